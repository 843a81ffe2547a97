"""The sections of a scenario, and the whole: types, ranges, defaults, and what follows from them."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

import yaml
from pydantic import BeforeValidator, Field, PrivateAttr

from rayfed.analysis.robustness import VERSUS
from rayfed.scenario.components import (
    AggregationSpec,
    AttackSpec,
    DataSpec,
    DefenceSpec,
    MaliciousSpec,
    ModelSpec,
    PartitionSpec,
    ProtectionSpec,
    Section,
    Short,
)
from rayfed.scenario.sweep import Sweep

if TYPE_CHECKING:
    import torch


class Training(Section):
    """What a client does in one round."""

    algorithm: Literal["fedavg", "fedsgd"] = "fedavg"
    """`fedavg`: local steps, the weight difference is sent. `fedsgd`: the gradient of one batch is sent."""
    epochs: Annotated[int, Field(ge=1)] | None = None
    """Passes over the client's data (fedavg); 1 when neither this nor `steps` is given."""
    steps: Annotated[int, Field(ge=1)] | None = None
    """Local steps instead of epochs (fedavg)."""
    batch_size: Annotated[int, Field(ge=1)] | None = 32
    """Samples of one step; null takes all of the client's samples."""
    sampling: Literal["shuffle", "poisson"] = "shuffle"
    """Batches of a fresh permutation each epoch; or each sample for itself with probability batch_size / samples in
    every step, which is what the privacy account of `dp_sgd` gains from."""
    lr: Annotated[float, Field(gt=0)] = 0.1
    """Learning rate of the local steps; the server's under fedsgd unless that has its own."""
    optimiser: Literal["sgd", "adam"] = "sgd"
    """Of the local steps (fedavg); it begins anew every round. No attack undoes the steps of `adam`."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Momentum of sgd, starting from zero every round."""
    vectorise: Literal["auto", "loop", "vmap"] = "auto"
    """A cohort as a loop over its clients, or as one `torch.func.vmap` call; `auto` takes vmap on CUDA where it can."""


class ServerSection(Section):
    """The server's optimiser (Reddi 2021, 'Adaptive federated optimization')."""

    optimiser: Literal["sgd", "adam"] = "sgd"
    """`sgd` with or without momentum, or `adam` (FedAdam)."""
    lr: Annotated[float, Field(gt=0)] | None = None
    """Step size; null: 1 under fedavg, the training's lr under fedsgd."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Momentum of sgd; first-moment decay of adam is 0.9."""


class Failures(Section):
    """What becomes of a client that fails in a round: its work raises, takes too long, or makes an update that is not
    finite or not of the model's names and shapes."""

    timeout: Annotated[float, Field(gt=0)] | None = None
    """Seconds that one client's local round may take, a cohort's as many times that as it has clients (`cohort_size`);
    whoever takes longer is ended. Leave room: an actor's first cohort is its slowest. Null: any time."""
    retries: Annotated[int, Field(ge=0)] = 1
    """How often a client that took too long is tried again, on another actor; other failures would come again."""
    then: Literal["stop", "drop"] = "stop"
    """`stop`: the run ends, and can be resumed. `drop`: the round goes on without the client, as if it had not been in
    its cohort; its row in the table `clients` says why."""


class FederationSection(Section):
    """Who takes part, how often, and how the server aggregates."""

    rounds: Annotated[int, Field(ge=1, le=1_000_000)]
    """Rounds of training."""
    clients: Annotated[int, Field(ge=1)]
    """Clients in the federation."""
    clients_per_round: Annotated[int, Field(ge=1)] | None = None
    """Clients drawn each round; null: all."""
    sampling: Literal["fixed", "poisson"] = "fixed"
    """So many clients uniformly without replacement; or each for itself with probability clients_per_round / clients,
    so that their number varies: the privacy account of `dp_fedavg` gains from it."""
    cohort_size: Annotated[int, Field(ge=1)] | None = None
    """Clients in one unit of work; null: a sixty-fourth of a round's clients, or an eighth where they are trained
    in one call (`vectorise: vmap`, or a GPU). It fixes the order in which updates are summed, so it belongs to the
    scenario and not to the cluster."""
    aggregation: Annotated[AggregationSpec, Short] = AggregationSpec(name="fedavg")
    """The rule; `fedavg` when not given."""
    validation: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of every client's own samples that it does not train on but keeps to validate models, in all arms alike, a
    part of each of its classes: a rule such as `fedboosting` asks for it."""
    protection: Annotated[ProtectionSpec, Short] | None = None
    """How clients hide their updates, so that the server reads no more than each round's sum; null: not at all."""
    malicious: MaliciousSpec | None = None
    """Clients that poison their data or updates, and how; null: none. Attacks observe the others."""
    failures: Failures = Failures()
    """What becomes of clients that fail."""
    server: ServerSection = ServerSection()
    """The server's optimiser."""
    evaluate_every: Annotated[int, Field(ge=1)] = 1
    """Rounds between evaluations on the test set; the last round is always evaluated."""
    evaluate_clients: bool = False
    """Ask in the same rounds what share of the clients' own samples the new weights classify right: the accuracy on the
    protected data where a defence protects all of them."""


def _stacked(value: Any) -> Any:
    """`arm: [...]` is short for `arm: {defences: [...]}`."""
    return {"defences": value} if isinstance(value, list) else value


class ArmSpec(Section):
    """One arm: its stack of defences, and what it does otherwise than the others. A list is the stack."""

    defences: list[Annotated[DefenceSpec, Short]] = []
    """Applied in the order written."""
    training: dict[str, Any] = {}
    """Fields of `training` that this arm sets otherwise: the batch size and the local steps protect, too."""
    model: dict[str, Any] = {}
    """Fields of `model` that this arm sets otherwise."""
    aggregation: Annotated[AggregationSpec, Short] | None = None
    """The rule of this arm; null: that of `federation`."""
    protection: Annotated[ProtectionSpec, Short] | None = None
    """The protection of this arm; null: that of `federation`."""
    malicious: MaliciousSpec | None = None
    """The malicious clients of this arm; null: those of `federation`."""


class Privacy(Section):
    """How (epsilon, delta) are accounted, for the defences that have one."""

    accountant: Literal["pld", "rdp"] | None = None
    """Privacy loss distributions, or Renyi differential privacy; null: the former where it can follow the sampling."""
    budget: Annotated[float, Field(gt=0)] | None = None
    """Epsilon that no arm may exceed: an arm stops before the round that would. Arms without a mechanism play on."""
    secure: bool = False
    """Draw noise, keys and who takes part from a key of the operating system's randomness instead of `seed`, noise
    with ChaCha20 and in double precision. Such a run cannot be repeated; first weights and attacks still follow
    from the seed."""


ImageMetric = Literal["mse", "psnr", "ssim", "lpips_alex", "lpips_vgg", "noise_ratio"]
OtherMetric = Literal["token_accuracy", "rouge1", "rouge2", "rougeL", "feature_accuracy"]
Recognised = Literal["top1", "top3", "top5"]
MetricName = ImageMetric | OtherMetric | Recognised | Literal["bp_ki", "bp_ki_posterior", "label_accuracy"]


class Metrics(Section):
    """How reconstructions are scored."""

    names: list[MetricName] = ["mse", "psnr", "ssim", "label_accuracy"]
    """The columns of the attacks' table that are filled. Of texts, where nothing is said: token_accuracy, rouge1,
    rouge2, rougeL, label_accuracy; of records: feature_accuracy, mse, psnr, label_accuracy."""
    success: dict[ImageMetric | OtherMetric, float] = {"psnr": 15.0}
    """From which value on a reconstruction counts: its share of the attacked images, the probability of reconstruction
    success (PoRS), stands in the report for each of these metrics that is measured. Of texts, where nothing is said:
    `token_accuracy: 0.9`; of records: `feature_accuracy: 0.9`."""
    lpips_weights: str | None = None
    """File or folder with the backbone's weights for LPIPS; null looks into torch's hub cache. Never downloads."""
    evaluator: str | None = None
    """File that `rayfed train-evaluator` wrote, for `noise_ratio`; null takes the network that comes with rayfed."""
    recogniser: str | None = None
    """File that `rayfed train-recogniser` wrote on these data, for `top1`, `top3` and `top5`; `~` and environment
    variables are expanded. Null: these columns stay empty."""


class Actors(Section):
    """One kind of actor."""

    actors: Annotated[int, Field(ge=1)] | None = None
    """How many; null: as many as the cluster's CPUs and GPUs allow."""
    num_cpus: Annotated[float, Field(ge=0)] | None = None
    """CPUs of one actor, may be a fraction; its threads are this, rounded up. Null: clients and attackers take turns on
    a core, so one each where there is no attack and half of one each otherwise; 0 for the server."""
    num_gpus: Annotated[float, Field(ge=0)] = 0.0
    """GPUs of one actor, may be a fraction below 1."""


class Resources(Section):
    """What each kind of actor asks of the cluster."""

    clients: Actors = Actors()
    """ClientActors host the virtual clients and score reconstructions."""
    server: Actors = Actors(actors=1)
    """The ServerActor; always one. It adds and does not train, on the CPU: it has no use for a GPU."""
    attackers: Actors = Actors()
    """AttackerActors."""


class Output(Section):
    """Where results go."""

    folder: str = "runs"
    """A local folder or any fsspec URL; each run makes `<name>-<time>` in it."""


class Scenario(Section):
    """One experiment, whole: the only thing that a user has to write."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]
    """Name of the run folder; letters, digits, '-', '_', '.'."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """All randomness follows from it, unless `privacy.secure` takes some of it from elsewhere."""
    data: Annotated[DataSpec, Short] = DataSpec(name="digits")
    """The data set."""
    partition: Annotated[PartitionSpec, Short] = PartitionSpec(name="iid")
    """How its training samples are dealt to clients."""
    model: Annotated[ModelSpec, Short] = ModelSpec(name="lenet")
    """The model that is trained."""
    training: Training = Training()
    """The local round."""
    federation: FederationSection
    """Rounds, clients, aggregation."""
    defences: list[Annotated[DefenceSpec, Short]] = []
    """One stack of defences, applied in the order written."""
    arms: dict[str, Annotated[ArmSpec, BeforeValidator(_stacked)]] = {}
    """Several named stacks to compare, instead of `defences`: same data, seeds and victims."""
    opponents: dict[str, MaliciousSpec | None] = {}
    """Malicious clients, or null for none, by a name: every arm is played against each of them, as `ARM vs NAME`."""
    privacy: Privacy = Privacy()
    """The privacy account."""
    attacks: list[Annotated[AttackSpec, Short]] = []
    """Who attacks what."""
    metrics: Metrics = Metrics()
    """How reconstructions are scored."""
    resources: Resources = Resources()
    """What actors ask of the cluster."""
    output: Output = Output()
    """Where the run folder is made."""
    sweep: Sweep | None = None
    """Fields that vary: the scenario then stands for many runs."""
    _run_key: bytes = PrivateAttr(b"")
    """Of a secure run; never a part of what is written."""

    def model_post_init(self, context: Any) -> None:
        """Draw the key of a run."""
        if self.privacy.secure:
            self._run_key = secrets.token_bytes(32)

    @property
    def run_key(self) -> bytes:
        """What a secure run's secrets follow from, 32 bytes; empty where they follow from the seed."""
        return self._run_key

    def with_run_key(self, key: bytes) -> Scenario:
        """The same, to go on with the key that a secure run began with."""
        copy = self.model_copy()
        copy._run_key = key
        return copy

    def secret(self, *purpose: int | str) -> bytes:
        """32 bytes for a purpose that clients know, and nobody else: a server or an attacker is told single ones."""
        from rayfed.seeds import derived  # takes PyTorch along, and who only reads a scenario does without

        if not self.privacy.secure:
            return derived(self.seed, *purpose)
        assert len(self._run_key) == 32, "a secure scenario without a key"
        return derived(self._run_key, *purpose)

    def generator(self, *purpose: int | str) -> torch.Generator:
        """What draws the noise of a purpose."""
        from rayfed.privacy.sampling import generator

        return generator(self.secret(*purpose), self.privacy.secure)

    @property
    def played(self) -> dict[str, ArmSpec]:
        """The arms that a run plays; one named after its stack when the scenario has no arms."""
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
        """The arms before each meets its `opponents`."""
        return list(self.arms or self.model_copy(update={"opponents": {}}).played)

    def owner_of(self, path: str) -> tuple[str | None, str]:
        """The arm that a field belongs to, or None where it is of all, and the field's path in it."""
        for arm in sorted(self.arms, key=len, reverse=True):  # `a.b` before `a`
            if path.startswith(f"arms.{arm}."):
                return arm, path.removeprefix(f"arms.{arm}.")
        return None, path

    def model_with(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """The model's fields with an arm's; another architecture does not take over the parameters of this one."""
        same = own.get("name", self.model.name) == self.model.name
        shared = self.model.model_dump(include=None if same else set(ModelSpec.model_fields))
        return {**shared, **own}

    def with_defences(self, defences: Mapping[str, list[DefenceSpec]]) -> Scenario:
        """The same with other defences in the same arms."""
        if not (self.arms or self.opponents):
            return self.model_copy(update={"defences": next(iter(defences.values()))})
        arms = {name: arm.model_copy(update={"defences": defences[name]}) for name, arm in self.played.items()}
        return self.model_copy(update={"defences": [], "arms": arms, "opponents": {}})

    @property
    def clients_per_round(self) -> int:
        """Clients drawn each round."""
        return self.federation.clients_per_round or self.federation.clients

    def attacked_in(self, round: int) -> Scenario:
        """The same with every attack in this round, its last, and no other."""
        return self.model_copy(
            update={
                "federation": self.federation.model_copy(update={"rounds": round + 1}),
                "attacks": [attack.model_copy(update={"rounds": [round]}) for attack in self.attacks],
                "sweep": None,
            }
        )

    def dump(self) -> str:
        """The scenario as YAML with every default written out; loading it gives the same scenario."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
