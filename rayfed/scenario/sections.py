"""Sections of a scenario: types, ranges, defaults and derived values of its fields."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from math import ceil, cos, pi
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PrivateAttr

from rayfed.core.documents import dump_yaml
from rayfed.errors import nearest
from rayfed.metrics.known import METRICS, default_names, default_success
from rayfed.metrics.renamed import present
from rayfed.scenario.components import (
    AggregationSpec,
    AttackSpec,
    DataSpec,
    DefenceSpec,
    LossSpec,
    MaliciousSpec,
    ModelSpec,
    PartitionSpec,
    ProtectionSpec,
    Section,
    Short,
)
from rayfed.scenario.sweep import Sweep
from rayfed.scenario.system import System
from rayfed.store.arms import find_owner, name_arm, name_pairs
from rayfed.store.schemas import VERSUS

if TYPE_CHECKING:
    import torch

    from rayfed.samples import Modality


class Schedule(Section):
    """Learning-rate schedule: a factor of `lr` for each round, constant within a round."""

    kind: Literal["constant", "cosine", "step", "milestones"] = "constant"
    """Shape of the schedule. `cosine`: decay from 1 to 0 along half a cosine wave. `step`: multiply by `factor` every
    `rounds` rounds. `milestones`: multiply by `factor` at each round in `milestones`. Default: constant."""
    rounds: Annotated[int, Field(ge=1)] | None = None
    """Number of rounds until `cosine` reaches 0 (after the warm-up), or between two steps of `step`. Default: none, for
    `constant` and `milestones`."""
    milestones: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """Rounds from which `milestones` multiplies the learning rate once more, counted from 0 after the warm-up. Example:
    [60, 120, 160]. Default: none."""
    factor: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Factor by which `step` and `milestones` multiply the learning rate. Default: 0.1."""
    warmup: Annotated[int, Field(ge=0)] = 0
    """Number of warm-up rounds, over which the factor rises linearly to 1. Default: 0."""

    def share(self, round: int) -> float:
        """Return the factor that multiplies `lr` in a round; rounds count from 0."""
        if round < self.warmup:
            return (round + 1) / self.warmup
        if self.kind == "milestones":
            passed = [milestone for milestone in self.milestones if milestone <= round - self.warmup]
            return float(self.factor ** len(passed))
        after = (round - self.warmup) / (self.rounds or 1)
        if self.kind == "cosine":
            return (1 + cos(pi * after)) / 2
        return float(self.factor ** int(after)) if self.kind == "step" else 1.0


class Augment(Section):
    """Random augmentation of the clients' images: sampled once per round, and used in all epochs of the round."""

    crop: Annotated[int, Field(ge=0)] = 0
    """Width of the black border that is added before a random crop to the original size, in pixels. Default: 0, no
    crop."""
    scale: Annotated[float, Field(gt=0, le=1)] | None = None
    """Minimum area of a random crop, as a share of the image's area. The crop has an aspect ratio of 3:4 to 4:3 and is
    resized to the original size. Default: null, no such crop."""
    flip: bool = False
    """Flip each image horizontally with probability 0.5."""


class Training(Section):
    """Local training of a client in one round."""

    algorithm: Literal["fedavg", "fedsgd"] = "fedavg"
    """Training algorithm. `fedavg`: the client takes local steps and sends the weight difference. `fedsgd`: the client
    sends the gradient of one batch."""
    epochs: Annotated[int, Field(ge=1)] | None = None
    """Number of epochs over the client's data (fedavg). Default: 1, unless `steps` is given."""
    steps: Annotated[int, Field(ge=1)] | None = None
    """Number of local steps, instead of `epochs` (fedavg)."""
    batch_size: Annotated[int, Field(ge=1)] | None = 32
    """Number of samples per step. Null: all of the client's samples."""
    sampling: Literal["shuffle", "poisson"] = "shuffle"
    """Sampling of batches. `shuffle`: a new permutation each epoch. `poisson`: include each sample in a step with
    probability batch_size / samples, which gives `dp_sgd` a smaller epsilon."""
    lr: Annotated[float, Field(gt=0)] = 0.1
    """Learning rate of the local steps. Under fedsgd also the server's learning rate, unless
    `federation.server.lr` is set."""
    schedule: Schedule = Schedule()
    """Learning-rate schedule over the rounds (fedavg)."""
    optimiser: Literal["sgd", "adam", "adamw", "adadelta"] = "sgd"
    """Optimiser of the local steps (fedavg). Its state is reset every round. No attack can invert the steps of `adam`,
    `adamw` and `adadelta`. A usual `lr` of `adadelta` is 1."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Momentum of sgd, reset to zero every round."""
    nesterov: bool = False
    """Use Nesterov's form of the momentum, as in PyTorch. No attack can invert its steps."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Weight decay of the local steps (fedavg). `adamw` applies it to the weights; the other optimisers add it to the
    gradient, as in PyTorch."""
    clip_norm: Annotated[float, Field(gt=0)] | None = None
    """Maximum norm of the gradient of a local step (fedavg). Longer gradients are scaled down to it. This stabilises
    training and is not a privacy mechanism (use `dp_sgd`). Default: null, no clipping."""
    precision: Literal["float32", "bf16"] = "float32"
    """Precision of clients' forward passes. `bf16`: mixed precision (`torch.autocast`), with weights and updates in
    float32. Attacks compute in float32."""
    augment: Augment | None = None
    """Random crops and flips of the training images. Reconstructions are compared with the augmented image. Default:
    null, no augmentation."""
    vectorise: Literal["auto", "loop", "vmap", "fused"] = "auto"
    """Training of a cohort. `loop`: one client after another. `vmap`: one `torch.func.vmap` call. `fused`: layers fused
    over the clients, faster for small models on CPU in cohorts of five or more. `auto`: `vmap` on CUDA if possible,
    otherwise `loop`. Updates agree up to rounding."""

    @property
    def trains_together(self) -> bool:
        """Return whether the scenario requires that the clients of a cohort are trained together."""
        return self.vectorise in ("vmap", "fused")

    def in_round(self, round: int) -> Training:
        """Return a copy of the training settings, with the learning rate of a round."""
        share = self.schedule.share(round)
        return self if share == 1 else self.model_copy(update={"lr": self.lr * share})


class ServerSection(Section):
    """Optimiser of the server (Reddi 2021, 'Adaptive federated optimization')."""

    optimiser: Literal["sgd", "adam"] = "sgd"
    """Optimiser: `sgd`, with or without momentum, or `adam` (FedAdam)."""
    lr: Annotated[float, Field(gt=0)] | None = None
    """Learning rate of the server. Default: 1 for fedavg, `training.lr` for fedsgd."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Momentum of sgd. The first-moment decay of adam is always 0.9."""


class Failures(Section):
    """Handling of clients that fail in a round.

    A client fails if its work raises an error or exceeds `timeout`. It also fails if its update is not finite, or does
    not match the model's parameters.
    """

    timeout: Annotated[float, Field(gt=0)] | None = None
    """Maximum time of one client's local round, in seconds. The limit of a cohort is this times its number of clients
    (`cohort_size`). Allow for the first cohort of an actor, which is the slowest. Default: null, no limit."""
    retries: Annotated[int, Field(ge=0)] = 1
    """Number of retries, on another actor, of a client that exceeded `timeout`. Other failures are not retried."""
    then: Literal["stop", "drop"] = "stop"
    """Action after a failure. `stop`: end the run, which can be resumed. `drop`: continue the round without the client,
    and record the reason in the table `clients`."""


class FederationSection(Section):
    """Federation: clients, rounds, client sampling and aggregation."""

    rounds: Annotated[int, Field(ge=1, le=1_000_000)]
    """Number of training rounds."""
    clients: Annotated[int, Field(ge=1)]
    """Number of clients in the federation."""
    clients_per_round: Annotated[int, Field(ge=1)] | None = None
    """Number of clients sampled each round. Default: all."""
    sampling: Literal["fixed", "poisson"] = "fixed"
    """Client sampling. `fixed`: `clients_per_round` clients, uniformly without replacement. `poisson`: each client
    independently with probability clients_per_round / clients, which gives `dp_fedavg` a smaller epsilon."""
    cohort_size: Annotated[int, Field(ge=1)] | None = None
    """Number of clients per cohort (unit of work), which fixes the order in which updates are summed. Default: 1/64 of
    the round's clients, at most 8, or 1/8 of the round's clients if they are trained together (`vectorise: vmap`,
    `fused`, or a GPU)."""
    aggregation: Annotated[AggregationSpec, Short] = AggregationSpec(name="fedavg")
    """Aggregation rule. Default: `fedavg`."""
    validation: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of every client's samples, stratified by class, that are used for validation and not for training, in all
    arms. Rules such as `fedboosting` require it. Default: 0."""
    protection: Annotated[ProtectionSpec, Short] | None = None
    """Protection of updates, so that the server sees only each round's sum. Default: null, none."""
    malicious: MaliciousSpec | None = None
    """Clients that poison their data or updates. Attacks observe only honest clients. Default: null, none."""
    failures: Failures = Failures()
    """Handling of clients that fail."""
    system: System | None = None
    """Simulated devices and networks of the clients, in virtual time. Default: null, not simulated."""
    server: ServerSection = ServerSection()
    """Optimiser of the server."""
    evaluate_every: Annotated[int, Field(ge=1)] = 1
    """Number of rounds between evaluations on the test set. The last round is always evaluated."""
    encrypted_images: Annotated[int, Field(ge=0)] = 0
    """Number of test images that the server also classifies under encryption after the last round, in arms with the
    model `cryptonet`. The server never sees these images. Needs the package tenseal. Default: 0."""
    evaluate_clients: bool = False
    """Also evaluate the new weights on the clients' own samples, in the same rounds. If a defence transforms all of
    them, the transformed samples are used."""

    @property
    def dropping(self) -> str | None:
        """Return the scenario field that may drop sampled clients from a round; None if no field does."""
        if self.failures.then == "drop":
            return "failures.then: drop"
        return "system" if self.system and self.system.drops else None


def _written_out(value: Any) -> Any:
    """Expand `arm: [...]`, which is short for `arm: {defences: [...]}`."""
    return {"defences": value} if isinstance(value, list) else value


class ArmSpec(Section):
    """One arm of a comparison: defences, and fields that differ from the scenario. A list is short for `defences`."""

    defences: list[Annotated[DefenceSpec, Short]] = []
    """Defences, applied in this order."""
    training: dict[str, Any] = {}
    """Fields of `training` that differ in this arm, such as `batch_size` or `steps`."""
    model: dict[str, Any] = {}
    """Fields of `model` that differ in this arm."""
    aggregation: Annotated[AggregationSpec, Short] | None = None
    """Aggregation rule of this arm. Default: `federation.aggregation`."""
    protection: Annotated[ProtectionSpec, Short] | None = None
    """Protection of this arm. Default: `federation.protection`."""
    malicious: MaliciousSpec | None = None
    """Malicious clients of this arm. Default: `federation.malicious`."""


class Privacy(Section):
    """Privacy accounting of the defences that have an (epsilon, delta)."""

    accountant: Literal["pld", "rdp"] | None = None
    """Privacy accountant. `pld`: privacy loss distributions. `rdp`: Rényi differential privacy. Default: `pld` if it
    supports the sampling, otherwise `rdp`."""
    budget: Annotated[float, Field(gt=0)] | None = None
    """Maximum epsilon. An arm stops before the round that would exceed it. Arms without a privacy mechanism continue.
    Default: null, no maximum."""
    secure: bool = False
    """Derive noise, keys and client sampling from the operating system's randomness instead of `seed`. Noise is sampled
    with ChaCha20 in double precision. A secure run cannot be reproduced. Initial weights and attacks still depend on
    `seed`."""


def _known(names: Iterable[str]) -> AfterValidator:
    """Return a validator that accepts only these names, and former names for them."""
    known = list(names)

    def check(name: str) -> str:
        name = present(name)
        if name not in known:
            raise ValueError(nearest(name, known))
        return name

    return AfterValidator(check)


_THRESHOLDS = [name for name, metric in METRICS.items() if metric.success]
_OTHER_FORMS: tuple[Modality, ...] = ("tokens", "records")
_NAMES = "; ".join(f"for {form}: {', '.join(default_names(form))}" for form in _OTHER_FORMS)
_SUCCESS = "; ".join(f"for {form}: `{n}: {t:g}`" for form in _OTHER_FORMS for n, t in default_success(form).items())


class Metrics(Section):
    """Metrics of reconstructions: `rayfed list metrics`."""

    names: list[Annotated[str, _known(METRICS), Field(json_schema_extra={"enum": list(METRICS)})]] = Field(
        default_names("pixels"),
        description=f"Metrics to compute. Default {_NAMES}.",
    )
    success: dict[Annotated[str, _known(_THRESHOLDS)], float] = Field(
        default_success("pixels"),
        description="Thresholds from which a reconstruction counts as successful. The report shows the share of "
        "successful reconstructions, the probability of reconstruction success (PoRS), for each measured metric. "
        f"Default {_SUCCESS}.",
    )
    lpips_weights: Path | None = None
    """File or folder with the backbone's weights for LPIPS. Default: torch's hub cache. Nothing is downloaded."""
    evaluator: Path | None = None
    """File from `rayfed train-evaluator`, for `noise_ratio`. Default: the network that comes with rayfed."""
    recogniser: Path | None = None
    """File from `rayfed train-recogniser` for this data set, for `top1`, `top3` and `top5`. `~` and environment
    variables are expanded. Default: null, these columns stay empty."""


_LABEL = r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
_LabelName = Annotated[str, Field(pattern=rf"^({_LABEL}/)?{_LABEL}$")]
_LabelValue = Annotated[str, Field(pattern=rf"^{_LABEL}$")]


class Actors(Section):
    """Cluster resources of one kind of actor."""

    actors: Annotated[int, Field(ge=1)] | None = None
    """Number of actors. Default: as many as the cluster's CPUs and GPUs allow."""
    num_cpus: Annotated[float, Field(ge=0)] | None = None
    """Number of CPUs per actor, possibly a fraction. Rounded up, it is the actor's number of threads. Default: 1 for
    clients without an attack, 0.5 for clients and attackers, 0 for the server. Attackers that share no CPU and no GPU
    with clients run a round's attacks while the clients train."""
    num_gpus: Annotated[float, Field(ge=0)] | Literal["auto"] = "auto"
    """GPUs per actor: a fraction, or 1 for a whole GPU. 0: CPU. `auto`: CPU if PyTorch (in a cluster: Ray) has no GPU;
    otherwise one actor of each kind measures its memory on a GPU, and as many actors share a GPU as fit. Results do not
    depend on the number of actors."""
    labels: dict[_LabelName, _LabelValue] = {}
    """Labels that a node needs for these actors, set with `ray start --labels`. Default: none, any node. If only one of
    clients and attackers has labels, the other kind is not placed on the labelled nodes."""

    @property
    def threads(self) -> int:
        """Return the number of threads per actor, which affects the order of sums in convolutions."""
        return max(1, ceil(self.num_cpus or 0))


class ServerActor(Actors):
    """Cluster resources of the server."""

    actors: Annotated[int, Field(ge=1)] | None = 1
    """Number of servers, always 1."""
    num_gpus: Annotated[float, Field(ge=0)] = 0.0
    """GPUs of the server, always 0: the server aggregates updates on the CPU."""


class Resources(Section):
    """Cluster resources by kind of actor, and settings of the actors' arithmetic."""

    clients: Actors = Actors()
    """Client actors, which train the virtual clients and score reconstructions."""
    server: ServerActor = ServerActor()
    """Server, always one, on the CPU. On a single machine it runs in the driver's process if the weights of all arms
    take at most 16 MiB and all rules are built-in sums. Otherwise, or with a protection, `privacy.secure`, `timeout`
    or `num_cpus` (also 0), it is an actor."""
    attackers: Actors = Actors()
    """Attacker actors, which run the attacks."""
    deterministic: Literal["machine", "portable"] = "machine"
    """Scope of bitwise reproducibility. `machine`: use all instructions of the processor; results are equal on
    processors of one kind. `portable`: use only AVX2; results are equal on all Intel processors that have it, but runs
    are slower (see docs/cluster.md)."""
    tf32: bool = False
    """Let clients' GPUs round the inputs of convolutions and matrix products to TF32 (10 bits). This is faster, and
    updates reveal slightly less. Attackers always compute in float32."""
    timeout: Annotated[float, Field(gt=0)] | None = None
    """Maximum time of an attack (per victim), an evaluation or a server step, in seconds. An attack that exceeds it is
    recorded as failed; any other call ends the run, which can be resumed. Clients' local rounds have
    `federation.failures.timeout`. Allow for the first call of an actor, which is the slowest. Default: null, no
    limit."""


class Output(Section):
    """Output of runs: folder, and samples shown in reports."""

    folder: str = "runs"
    """Output folder, local or any fsspec URL. Each run creates `<name>-<time>` in it."""
    images: Literal["none", "blurred", "worst", "all"] | None = None
    """Original and reconstructed samples shown in `report.html`. `none`: only scores. `blurred`: images averaged over
    4x4 blocks, and which words are correct (still derived from samples). `worst`: the sample of each arm that leaked
    most. `all`: the sample of each arm and attack that leaked most. Default: `all` for known public data sets,
    otherwise reconstructions without originals. The tables contain all samples; see `rayfed report RUN --redact`."""


NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]*$"
"""Pattern of scenario names."""


class Scenario(Section):
    """A scenario: the description of one experiment."""

    name: Annotated[str, Field(pattern=NAME)]
    """Name of the scenario and prefix of its run folders: letters, digits, '-', '_', '.'."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Random seed of all randomness, except the part that `privacy.secure` replaces. The random numbers of an arm or
    attack also depend on its name. Default: 0."""
    data: Annotated[DataSpec, Short] = DataSpec(name="digits")
    """Data set."""
    partition: Annotated[PartitionSpec, Short] = PartitionSpec(name="iid")
    """Partition of the training samples among clients."""
    model: Annotated[ModelSpec, Short] = ModelSpec(name="lenet")
    """Model to train."""
    loss: Annotated[LossSpec, Short] = LossSpec(name="cross_entropy")
    """Training loss."""
    training: Training = Training()
    """Local training of the clients."""
    federation: FederationSection
    """Rounds, clients and aggregation."""
    defences: list[Annotated[DefenceSpec, Short]] = []
    """Defences, applied in this order."""
    arms: dict[str, Annotated[ArmSpec, BeforeValidator(_written_out)]] = {}
    """Named arms to compare, instead of `defences`. All arms use the same data, seed and victims."""
    opponents: dict[str, MaliciousSpec | None] = {}
    """Malicious clients by name, or null for none. Every arm is run against each of them, as `ARM vs NAME`."""
    privacy: Privacy = Privacy()
    """Privacy accounting."""
    attacks: list[Annotated[AttackSpec, Short]] = []
    """Attacks to run."""
    metrics: Metrics = Metrics()
    """Metrics of reconstructions."""
    resources: Resources = Resources()
    """Cluster resources of the actors, and settings of the actors' arithmetic."""
    output: Output = Output()
    """Location of run folders, and samples shown in reports."""
    sweep: Sweep | None = None
    """Fields to vary over many runs. Default: null, a single run."""
    _run_key: bytes = PrivateAttr(b"")
    """Key of a secure run; never written."""

    def model_post_init(self, context: Any) -> None:
        """Sample the key of a secure run from the operating system's randomness, if `privacy.secure` is set."""
        if self.privacy.secure:
            self._run_key = secrets.token_bytes(32)

    @property
    def run_key(self) -> bytes:
        """Return the key of a secure run, 32 bytes; empty without `privacy.secure`."""
        return self._run_key

    def with_run_key(self, key: bytes) -> Scenario:
        """Return a copy of the scenario with the key of a secure run, to resume the run."""
        copy = self.model_copy()
        copy._run_key = key
        return copy

    def secret(self, *purpose: int | str) -> bytes:
        """Return the clients' secret for a purpose, 32 bytes. Servers and attackers receive only single secrets."""
        from rayfed.core.seeds import derive_bytes  # imports PyTorch, which reading a scenario does not need

        if not self.privacy.secure:
            return derive_bytes(self.seed, *purpose)
        assert len(self._run_key) == 32, "a secure scenario without a key"
        return derive_bytes(self._run_key, *purpose)

    def generator(self, *purpose: int | str) -> torch.Generator:
        """Return the random generator for a purpose, such as the noise of a client's defences in a round."""
        from rayfed.privacy.sampling import make_generator

        return make_generator(self.secret(*purpose), self.privacy.secure)

    @property
    def played(self) -> dict[str, ArmSpec]:
        """Return the arms of a run by name. A scenario without `arms` has one arm, named after its defences."""
        arms = self.arms or {name: ArmSpec(defences=self.defences) for name in self.written_arms}
        if not self.opponents:
            return arms
        return {
            name: arms[arm].model_copy(update={"malicious": self.opponents[opponent]})
            for name, (arm, opponent) in name_pairs(arms, self.opponents)
        }

    @property
    def written_arms(self) -> list[str]:
        """Return the names of the arms, not combined with `opponents` (malicious clients)."""
        return list(self.arms) or [name_arm(defence.name for defence in self.defences)]

    def owner_of(self, path: str) -> tuple[str | None, str]:
        """Return the arm that a field belongs to (None: all arms), and the field's path within the arm."""
        return find_owner(path, self.arms)

    def model_with(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of the scenario's model, updated by the `model` fields of an arm.

        If the arm has another architecture, the scenario's model parameters and weights are dropped.
        """
        same = own.get("name", self.model.name) == self.model.name
        shared = self.model.model_dump(include=None if same else set(ModelSpec.model_fields) - {"state"})
        return {**shared, **own}

    def with_defences(self, defences: Mapping[str, list[DefenceSpec]]) -> Scenario:
        """Return a copy of the scenario in which `defences`, given by arm, replace the defences of each arm."""
        if not (self.arms or self.opponents):
            return self.model_copy(update={"defences": next(iter(defences.values()))})
        arms = self.arms or self.model_copy(update={"opponents": {}}).played
        opponent = next((f"{VERSUS}{name}" for name in self.opponents), "")  # any: an arm's defences are the same
        own = {name: arm.model_copy(update={"defences": defences[name + opponent]}) for name, arm in arms.items()}
        return self.model_copy(update={"defences": [], "arms": own})

    @property
    def clients_per_round(self) -> int:
        """Return the number of clients whose updates a round waits for."""
        return self.federation.clients_per_round or self.federation.clients

    @property
    def drawn_per_round(self) -> int:
        """Return the number of clients sampled per round, including those added by `over_selection`."""
        system = self.federation.system
        if system is None:
            return self.clients_per_round
        return ceil(round(self.clients_per_round * system.over_selection, 9))  # 100 * 1.1 is above 110 in binary

    def attacked_in(self, round: int) -> Scenario:
        """Return a copy of the scenario that ends after a round and runs every attack in that round."""
        return self.model_copy(
            update={
                "federation": self.federation.model_copy(update={"rounds": round + 1}),
                "attacks": [attack.model_copy(update={"rounds": [round]}) for attack in self.attacks],
                "sweep": None,
            }
        )

    def dump(self) -> str:
        """Return the scenario as YAML, with every default written out."""
        return dump_yaml(self.model_dump(mode="json"))
