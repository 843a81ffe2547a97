"""The sections of a scenario: types, ranges, defaults, and derived values."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterable, Mapping
from math import ceil, cos, pi
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PrivateAttr

from rayfed.documents import dump_yaml
from rayfed.errors import nearest
from rayfed.metrics.known import METRICS, default_names, default_success
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
from rayfed.store.schemas import VERSUS

if TYPE_CHECKING:
    import torch

    from rayfed.samples import Modality


class Schedule(Section):
    """Learning rate over the rounds, as a share of `lr`, constant within a round."""

    kind: Literal["constant", "cosine", "step"] = "constant"
    """`cosine`: half a wave from 1 down to 0. `step`: times `factor` every so many rounds."""
    rounds: Annotated[int, Field(ge=1)] | None = None
    """Rounds after the warm-up: until `cosine` is at 0, or from one `step` to the next."""
    factor: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Factor of `step`."""
    warmup: Annotated[int, Field(ge=0)] = 0
    """First rounds, over which the share rises in equal steps to 1."""

    def share(self, round: int) -> float:
        """Return the factor of `lr` in a round; rounds count from 0."""
        if round < self.warmup:
            return (round + 1) / self.warmup
        after = (round - self.warmup) / (self.rounds or 1)
        if self.kind == "cosine":
            return (1 + cos(pi * after)) / 2
        return float(self.factor ** int(after)) if self.kind == "step" else 1.0


class Augment(Section):
    """Augmentation of clients' images, drawn anew in every round, the same in all of its passes over the data."""

    crop: Annotated[int, Field(ge=0)] = 0
    """Pixels of a black border, out of which a part of the image's own size is cut at a random place; 0: no crop."""
    scale: Annotated[float, Field(gt=0, le=1)] | None = None
    """Smallest share of the area of a random part, 3:4 to 4:3 in shape, which is enlarged to the image's own size;
    null: none."""
    flip: bool = False
    """Flip each image left to right with probability a half."""


class Training(Section):
    """Local training of a client in one round."""

    algorithm: Literal["fedavg", "fedsgd"] = "fedavg"
    """`fedavg`: local steps, the weight difference is sent. `fedsgd`: the gradient of one batch is sent."""
    epochs: Annotated[int, Field(ge=1)] | None = None
    """Passes over the client's data (fedavg); 1 when neither this nor `steps` is given."""
    steps: Annotated[int, Field(ge=1)] | None = None
    """Number of local steps, instead of epochs (fedavg)."""
    batch_size: Annotated[int, Field(ge=1)] | None = 32
    """Number of samples of one step; null takes all of the client's samples."""
    sampling: Literal["shuffle", "poisson"] = "shuffle"
    """Draw of batches: from a fresh permutation each epoch, or each sample for itself with probability batch_size /
    samples in every step, from which the privacy account of `dp_sgd` gains."""
    lr: Annotated[float, Field(gt=0)] = 0.1
    """Learning rate of the local steps; the server's under fedsgd unless that has its own."""
    schedule: Schedule = Schedule()
    """Learning rate over the rounds (fedavg)."""
    optimiser: Literal["sgd", "adam", "adamw"] = "sgd"
    """Optimiser of the local steps (fedavg); it begins anew every round. No attack undoes the steps of `adam` and
    `adamw`."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Momentum of sgd, starting from zero every round."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Weight decay of the local steps (fedavg): `adamw` shrinks the weights themselves, the others add this times the
    weights to the gradient."""
    clip_norm: Annotated[float, Field(gt=0)] | None = None
    """Largest norm of the gradient of a local step (fedavg): longer ones are scaled down to it. It keeps training
    stable and is no privacy mechanism, which `dp_sgd` is. Null: any."""
    precision: Literal["float32", "bf16"] = "float32"
    """`bf16`: clients' forward passes in mixed precision (`torch.autocast`), weights and updates in float32. Attacks
    calculate in float32."""
    augment: Augment | None = None
    """Random crops and flips of the images that clients train on. Reconstructions are scored by the image that was
    trained on, which is what leaks. Null: images as they are."""
    vectorise: Literal["auto", "loop", "vmap", "fused"] = "auto"
    """Train a cohort client by client, in one `torch.func.vmap` call, or with layers fused over its clients, which is
    faster for small models on CPU in cohorts of five or more. Updates are those of the loop up to rounding. `auto`:
    vmap on CUDA where it can, else the loop."""

    @property
    def trains_together(self) -> bool:
        """Whether the scenario demands that cohorts are trained together."""
        return self.vectorise in ("vmap", "fused")

    def in_round(self, round: int) -> Training:
        """Return the training with the learning rate of a round."""
        share = self.schedule.share(round)
        return self if share == 1 else self.model_copy(update={"lr": self.lr * share})


class ServerSection(Section):
    """The server's optimiser (Reddi 2021, 'Adaptive federated optimization')."""

    optimiser: Literal["sgd", "adam"] = "sgd"
    """`sgd` with or without momentum, or `adam` (FedAdam)."""
    lr: Annotated[float, Field(gt=0)] | None = None
    """Step size; null: 1 under fedavg, the training's lr under fedsgd."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Momentum of sgd; first-moment decay of adam is 0.9."""


class Failures(Section):
    """Handling of clients that fail in a round.

    A client fails where its work raises, takes too long, or makes an update that is not finite or not of the model's
    names and shapes.
    """

    timeout: Annotated[float, Field(gt=0)] | None = None
    """Seconds that one client's local round may take, a cohort's as many times that as it has clients (`cohort_size`);
    a client that takes longer is ended. Leave room: an actor's first cohort is its slowest. Null: any time."""
    retries: Annotated[int, Field(ge=0)] = 1
    """Number of new tries of a client that took too long, on another actor; other failures would come again."""
    then: Literal["stop", "drop"] = "stop"
    """`stop`: the run ends, and can be resumed. `drop`: the round goes on without the client, as if it had not been in
    its cohort; its row in the table `clients` says why."""


class FederationSection(Section):
    """The federation: clients, rounds, sampling, and the server's aggregation."""

    rounds: Annotated[int, Field(ge=1, le=1_000_000)]
    """Number of rounds of training."""
    clients: Annotated[int, Field(ge=1)]
    """Number of clients in the federation."""
    clients_per_round: Annotated[int, Field(ge=1)] | None = None
    """Number of clients drawn each round; null: all."""
    sampling: Literal["fixed", "poisson"] = "fixed"
    """Draw of clients: so many uniformly without replacement, or each for itself with probability clients_per_round /
    clients, so that their number varies: the privacy account of `dp_fedavg` gains from it."""
    cohort_size: Annotated[int, Field(ge=1)] | None = None
    """Number of clients in one unit of work; null: a sixty-fourth of a round's clients, eight at most, or an eighth of
    them where they are trained together (`vectorise: vmap`, `fused`, or a GPU). It fixes the order in which updates are
    summed, so it belongs to the scenario and not to the cluster."""
    aggregation: Annotated[AggregationSpec, Short] = AggregationSpec(name="fedavg")
    """The aggregation rule; `fedavg` when not given."""
    validation: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of every client's own samples that it does not train on but keeps to validate models, in all arms alike, a
    part of each of its classes: a rule such as `fedboosting` asks for it."""
    protection: Annotated[ProtectionSpec, Short] | None = None
    """Protection of updates, so that the server reads no more than each round's sum; null: none."""
    malicious: MaliciousSpec | None = None
    """Clients that poison their data or updates, and how; null: none. Attacks observe the others."""
    failures: Failures = Failures()
    """Handling of clients that fail."""
    system: System | None = None
    """Devices and networks of the clients, for virtual time; null: nothing is simulated of them."""
    server: ServerSection = ServerSection()
    """The server's optimiser."""
    evaluate_every: Annotated[int, Field(ge=1)] = 1
    """Number of rounds between evaluations on the test set; the last round is always evaluated."""
    evaluate_clients: bool = False
    """Evaluate in the same rounds the accuracy of the new weights on the clients' own samples: on the protected data
    where a defence protects all of them."""

    @property
    def dropping(self) -> str | None:
        """The field that may leave drawn clients out of a round; None without one."""
        if self.failures.then == "drop":
            return "failures.then: drop"
        return "system" if self.system and self.system.drops else None


def _written_out(value: Any) -> Any:
    """Expand a list: `arm: [...]` is short for `arm: {defences: [...]}`."""
    return {"defences": value} if isinstance(value, list) else value


class ArmSpec(Section):
    """One arm: its defence pipeline, and its differences from the other arms. A list is the pipeline."""

    defences: list[Annotated[DefenceSpec, Short]] = []
    """The defences, applied in the order written."""
    training: dict[str, Any] = {}
    """Fields of `training` that differ in this arm: the batch size and the local steps protect, too."""
    model: dict[str, Any] = {}
    """Fields of `model` that differ in this arm."""
    aggregation: Annotated[AggregationSpec, Short] | None = None
    """The aggregation rule of this arm; null: that of `federation`."""
    protection: Annotated[ProtectionSpec, Short] | None = None
    """The protection of this arm; null: that of `federation`."""
    malicious: MaliciousSpec | None = None
    """The malicious clients of this arm; null: those of `federation`."""


class Privacy(Section):
    """Accounting of (epsilon, delta), for the defences that have one."""

    accountant: Literal["pld", "rdp"] | None = None
    """Privacy loss distributions, or Renyi differential privacy; null: the former where it can follow the sampling."""
    budget: Annotated[float, Field(gt=0)] | None = None
    """Epsilon that no arm may exceed: an arm stops before the round that would. Arms without a mechanism play on."""
    secure: bool = False
    """Draw noise, keys and who takes part from a key of the operating system's randomness instead of `seed`, noise
    with ChaCha20 and in double precision. Such a run cannot be repeated; first weights and attacks still follow
    from the seed."""


def _known(names: Iterable[str]) -> AfterValidator:
    """Return a validator that accepts only these names."""
    known = list(names)

    def check(name: str) -> str:
        if name not in known:
            raise ValueError(nearest(name, known))
        return name

    return AfterValidator(check)


_THRESHOLDS = [name for name, metric in METRICS.items() if metric.success]
_OTHER_FORMS: tuple[Modality, ...] = ("tokens", "records")
_NAMES = "; ".join(f"of {form}: {', '.join(default_names(form))}" for form in _OTHER_FORMS)
_SUCCESS = "; ".join(f"of {form}: `{n}: {t:g}`" for form in _OTHER_FORMS for n, t in default_success(form).items())


class Metrics(Section):
    """Metrics that reconstructions are scored by: `rayfed list metrics`."""

    names: list[Annotated[str, _known(METRICS), Field(json_schema_extra={"enum": list(METRICS)})]] = Field(
        default_names("pixels"),
        description=f"The columns of the attacks' table that are filled. Where nothing is said, {_NAMES}.",
    )
    success: dict[Annotated[str, _known(_THRESHOLDS)], float] = Field(
        default_success("pixels"),
        description="From which value on a reconstruction counts: its share of the attacked images, the probability of "
        "reconstruction success (PoRS), stands in the report for each of these metrics that is measured. Where nothing "
        f"is said, {_SUCCESS}.",
    )
    lpips_weights: Path | None = None
    """File or folder with the backbone's weights for LPIPS; null looks into torch's hub cache. Never downloads."""
    evaluator: Path | None = None
    """File that `rayfed train-evaluator` wrote, for `noise_ratio`; null takes the network that comes with rayfed."""
    recogniser: Path | None = None
    """File that `rayfed train-recogniser` wrote on these data, for `top1`, `top3` and `top5`; `~` and environment
    variables are expanded. Null: these columns stay empty."""


_LABEL = r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
_LabelName = Annotated[str, Field(pattern=rf"^({_LABEL}/)?{_LABEL}$")]
_LabelValue = Annotated[str, Field(pattern=rf"^{_LABEL}$")]


class Actors(Section):
    """Settings of one kind of actor."""

    actors: Annotated[int, Field(ge=1)] | None = None
    """Number of actors; null: as many as the cluster's CPUs and GPUs allow."""
    num_cpus: Annotated[float, Field(ge=0)] | None = None
    """CPUs of one actor, may be a fraction; its threads are this, rounded up. Null: clients and attackers take turns on
    a core, so one each where there is no attack and half of one each otherwise; 0 for the server. Attackers that share
    no core and no part of a GPU with clients begin with a round's attacks while these train."""
    num_gpus: Annotated[float, Field(ge=0)] | Literal["auto"] = "auto"
    """GPUs per actor: a fraction below 1, or a whole number. 0: CPU. `auto`: CPU if PyTorch (in a cluster: Ray) has no
    GPU; otherwise one actor of each kind measures its memory on a GPU, and as many actors share a GPU as fit. Results
    do not depend on the number of actors."""
    labels: dict[_LabelName, _LabelValue] = {}
    """Labels that a node needs for these actors, as `ray start --labels` gives them; none: any node. If one of clients
    and attackers has labels and the other has none, the other stays off the nodes that have them."""

    @property
    def threads(self) -> int:
        """Number of threads of one actor, which affects the order of sums in convolutions."""
        return max(1, ceil(self.num_cpus or 0))


class ServerActor(Actors):
    """Settings of the server."""

    actors: Annotated[int, Field(ge=1)] | None = 1
    """Number of servers, always 1."""
    num_gpus: Annotated[float, Field(ge=0)] = 0.0
    """GPUs of the server, always 0: it adds updates on the CPU."""


class Resources(Section):
    """Resources of the cluster, by kind of actor, and how they calculate."""

    clients: Actors = Actors()
    """ClientActors host the virtual clients and score reconstructions."""
    server: ServerActor = ServerActor()
    """The server; always one. It adds and does not train, on the CPU: it has no use for a GPU. It is an actor, or where
    all that it does is add, an object of the driver's process: on a Ray of this machine alone, with weights of no more
    than 16 MiB in all arms together, a rule of rayfed's own that adds sums, no protection, no `privacy.secure` and no
    `timeout`. With `num_cpus`, 0 among them, it is always an actor."""
    attackers: Actors = Actors()
    """AttackerActors."""
    deterministic: Literal["machine", "portable"] = "machine"
    """`machine`: all instructions that a processor has, with the same bits on processors of one kind. `portable`: AVX2
    alone, in all processes, for the same bits on all Intel processors that have it; slower, see docs/cluster.md."""
    tf32: bool = False
    """Let the GPUs of clients round the factors of convolutions and matrix products to TF32, 10 bits: faster, and
    attacks see less. Attackers compute in float32 all the same: what a client saves is no limit of theirs."""
    timeout: Annotated[float, Field(gt=0)] | None = None
    """Seconds that a call may take which is no client's local round (`federation.failures.timeout` is for these): an
    attack, for each of its victims; an evaluation; a step of the server. An attack that takes longer is a row in the
    tables that says so, anything else ends the run, which can be resumed. Leave room: an actor's first call is its
    slowest. Null: any time."""


class Output(Section):
    """Output of runs."""

    folder: str = "runs"
    """A local folder or any fsspec URL; each run makes `<name>-<time>` in it."""
    images: Literal["none", "blurred", "worst", "all"] | None = None
    """Samples on the page `report.html`: images, texts or records, true and reconstructed. `none`: scores alone.
    `blurred`: averages over 4x4 fields of an image, and which words are right; still of the sample. `worst`: of each
    arm the sample that leaked most. `all`: the worst of each arm and attack. Null: `all` where the data set is known to
    be public, elsewhere reconstructions without the truth. The tables keep all of them; see
    `rayfed report RUN --redact`."""


NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]*$"
"""Pattern of a scenario's name."""


class Scenario(Section):
    """A scenario: one whole experiment, the only file that a user has to write."""

    name: Annotated[str, Field(pattern=NAME)]
    """Name of the run folder; letters, digits, '-', '_', '.'."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """All randomness follows from it, unless `privacy.secure` takes some of it from elsewhere."""
    data: Annotated[DataSpec, Short] = DataSpec(name="digits")
    """The data set."""
    partition: Annotated[PartitionSpec, Short] = PartitionSpec(name="iid")
    """The partition of its training samples among clients."""
    model: Annotated[ModelSpec, Short] = ModelSpec(name="lenet")
    """The model that is trained."""
    loss: Annotated[LossSpec, Short] = LossSpec(name="cross_entropy")
    """The loss that it is trained for."""
    training: Training = Training()
    """The clients' local training."""
    federation: FederationSection
    """Rounds, clients, aggregation."""
    defences: list[Annotated[DefenceSpec, Short]] = []
    """The defence pipeline: defences applied in the order written."""
    arms: dict[str, Annotated[ArmSpec, BeforeValidator(_written_out)]] = {}
    """Several named defence pipelines to compare, instead of `defences`: same data, seeds and victims."""
    opponents: dict[str, MaliciousSpec | None] = {}
    """Malicious clients, or null for none, by a name: every arm is played against each of them, as `ARM vs NAME`."""
    privacy: Privacy = Privacy()
    """The privacy account."""
    attacks: list[Annotated[AttackSpec, Short]] = []
    """The attacks."""
    metrics: Metrics = Metrics()
    """How reconstructions are scored."""
    resources: Resources = Resources()
    """Resources that actors ask of the cluster, and how they calculate."""
    output: Output = Output()
    """Place of the run folder."""
    sweep: Sweep | None = None
    """Fields that vary: the scenario then stands for many runs."""
    _run_key: bytes = PrivateAttr(b"")
    """Key of a secure run; never a part of what is written."""

    def model_post_init(self, context: Any) -> None:
        """Draw the key of a secure run."""
        if self.privacy.secure:
            self._run_key = secrets.token_bytes(32)

    @property
    def run_key(self) -> bytes:
        """Key of a secure run's secrets, 32 bytes; empty if they follow from the seed."""
        return self._run_key

    def with_run_key(self, key: bytes) -> Scenario:
        """Return a copy that continues with the key of a secure run."""
        copy = self.model_copy()
        copy._run_key = key
        return copy

    def secret(self, *purpose: int | str) -> bytes:
        """Return 32 bytes for a purpose, which only clients know: a server or an attacker is told single ones."""
        from rayfed.seeds import derived  # takes PyTorch along, and who only reads a scenario does without

        if not self.privacy.secure:
            return derived(self.seed, *purpose)
        assert len(self._run_key) == 32, "a secure scenario without a key"
        return derived(self._run_key, *purpose)

    def generator(self, *purpose: int | str) -> torch.Generator:
        """Return the random generator of the noise for one purpose."""
        from rayfed.privacy.sampling import generator

        return generator(self.secret(*purpose), self.privacy.secure)

    @property
    def played(self) -> dict[str, ArmSpec]:
        """The arms that a run plays; without `arms`, one named after its defences."""
        arms = self.arms or {"+".join(d.name for d in self.defences) or "none": ArmSpec(defences=self.defences)}
        if not self.opponents:
            return arms
        return {
            f"{name}{VERSUS}{opponent}": arm.model_copy(update={"malicious": malicious})
            for name, arm in arms.items()
            for opponent, malicious in self.opponents.items()
        }

    @property
    def written_arms(self) -> list[str]:
        """Names of the arms before they are combined with `opponents`."""
        return list(self.arms or self.model_copy(update={"opponents": {}}).played)

    def owner_of(self, path: str) -> tuple[str | None, str]:
        """Return the arm that a field belongs to, None for all arms, and the field's path in it."""
        for arm in sorted(self.arms, key=len, reverse=True):  # `a.b` before `a`
            if path.startswith(f"arms.{arm}."):
                return arm, path.removeprefix(f"arms.{arm}.")
        return None, path

    def model_with(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """Return the model's fields updated by an arm's; another architecture drops parameters and weights."""
        same = own.get("name", self.model.name) == self.model.name
        shared = self.model.model_dump(include=None if same else set(ModelSpec.model_fields) - {"state"})
        return {**shared, **own}

    def with_defences(self, defences: Mapping[str, list[DefenceSpec]]) -> Scenario:
        """Return a copy with other defences in the same arms."""
        if not (self.arms or self.opponents):
            return self.model_copy(update={"defences": next(iter(defences.values()))})
        arms = self.arms or self.model_copy(update={"opponents": {}}).played
        opponent = next((f"{VERSUS}{name}" for name in self.opponents), "")  # an arm has the same against all
        own = {name: arm.model_copy(update={"defences": defences[name + opponent]}) for name, arm in arms.items()}
        return self.model_copy(update={"defences": [], "arms": own})

    @property
    def clients_per_round(self) -> int:
        """Number of clients whose updates a round needs."""
        return self.federation.clients_per_round or self.federation.clients

    @property
    def drawn_per_round(self) -> int:
        """Number of clients drawn each round, more than needed with `over_selection`."""
        system = self.federation.system
        if system is None:
            return self.clients_per_round
        return ceil(round(self.clients_per_round * system.over_selection, 9))  # in binary 100 times 1.1 is above 110

    def attacked_in(self, round: int) -> Scenario:
        """Return a copy with every attack in this round only, as its last."""
        return self.model_copy(
            update={
                "federation": self.federation.model_copy(update={"rounds": round + 1}),
                "attacks": [attack.model_copy(update={"rounds": [round]}) for attack in self.attacks],
                "sweep": None,
            }
        )

    def with_arms(self, names: Collection[str] | None) -> Scenario:
        """Return a copy with these of its `arms` alone; None for all."""
        if names is None:
            return self
        return self.model_copy(update={"arms": {name: arm for name, arm in self.arms.items() if name in names}})

    def dump(self) -> str:
        """Return the scenario as YAML with every default written out; loading it gives the same scenario."""
        return dump_yaml(self.model_dump(mode="json"))
