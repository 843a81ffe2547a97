"""Rows of a run's tables: one dataclass for each table, with the meaning and unit of each column.

A table is a folder of Parquet files, one per round. The Arrow schemas (`rayfed.store.schemas`), the reference page of
the tables and `rayfed.store.typed.rows_from` are derived from these classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from rayfed.core.reasons import Reason
from rayfed.store.typed import Int32, column, key

_REASON = (
    "why an attack could not use an update fully: 'encrypted' or 'masked' (the attacker cannot read it), "
    "'undeclared', 'declaration_wrong' or 'declaration_not_tested' (of a defence), or 'buffers_not_solved' (the "
    "returned buffers could determine the samples, but no samples were found that fit); null for another reason"
)


class CandidateScore(NamedTuple):
    """Score of one candidate of a membership attack."""

    kind: str
    """'member' or 'non-member'."""
    sample: int
    """Index of the candidate in its split."""
    score: float
    control: float
    """Score on an update computed without any candidate."""


class RecordColumn(NamedTuple):
    """Result for one column of a record."""

    name: str
    found: bool
    """Whether the column's value was recovered, within tolerance."""
    guess: float
    """Share of other records for which the best constant is right."""


@dataclass(frozen=True, kw_only=True)
class ArmRow:
    """Row on an arm."""

    arm: str = key("name of the arm, a training with one chain of defences")


@dataclass(frozen=True, kw_only=True)
class ArmRoundRow(ArmRow):
    """Row on one round of an arm."""

    round: Int32 = key("communication round, from 0; pages and the terminal count from 1")


@dataclass(frozen=True, kw_only=True)
class AttackedRow(ArmRoundRow):
    """Columns that identify an attack on an update."""

    attack: str = key("the attack's label in the scenario, or its name without a label")
    victim: Int32 = key("id of the client whose update was attacked")
    repeat: Int32 = key(
        "number of the attack on that victim in that round, from 0; each attack has its own random seed"
    )


@dataclass(frozen=True, kw_only=True)
class SampleRow(AttackedRow):
    """Columns that identify an attacked sample and its reconstruction."""

    sample: Int32 = key("index of the true image in the victim's batch")


@dataclass(frozen=True, kw_only=True)
class RoundRow(ArmRoundRow):
    """Training of one arm in one round."""

    train_loss: float | None = column("mean training loss of the round's clients, weighted by samples")
    test_loss: float | None = column("mean loss on the test set (cross entropy in nats); null if not evaluated")
    test_accuracy: float | None = column(
        "share of the test set's labels predicted correctly, 0..1; null if not evaluated or for regression"
    )
    test_error: float | None = column("mean absolute error on the test set; regression only")
    test_perplexity: float | None = column(
        "exponential of the mean cross entropy of the test set's tokens; language models only"
    )
    test_iou: float | None = column("mean intersection over union of the classes on the test set; masks only")
    train_accuracy: float | None = column("share of all clients' own samples classified correctly, 0..1")
    non_member_accuracy: float | None = column("test accuracy of a non-member with a random private part, 0..1")
    non_member_mean_accuracy: float | None = column(
        "test accuracy of a non-member with the mean of the clients' private parts but random keys, 0..1"
    )
    non_member_zero_accuracy: float | None = column(
        "test accuracy of a non-member with zeros for the clients' private parts and random keys, 0..1"
    )
    encrypted_accuracy: float | None = column(
        "share of the first test images that the server classifies correctly under encryption, 0..1; null without "
        "`encrypted_images`"
    )
    encrypted_agreement: float | None = column("share of these images that get the class of the plain network, 0..1")
    encrypted_seconds: float | None = column("mean wall time to encrypt, classify and decrypt one of these images (s)")
    encrypted_bytes: int | None = column("mean size of one encrypted image and its encrypted logits (bytes)")
    backdoor_accuracy: float | None = column("share of test images with the trigger classified as its target, 0..1")
    baseline_accuracy: float | None = column(
        "test accuracy of always predicting the majority class, 0..1: 95 % of test sets of this size have less"
    )
    baseline_error: float | None = column("mean absolute error of always predicting the test set's median")
    baseline_perplexity: float | None = column("perplexity of predicting each token's frequency in the test set")
    baseline_iou: float | None = column("intersection over union of predicting the majority class at every pixel")
    clients: Int32 | None = column("number of clients whose updates were aggregated")
    samples: int | None = column("number of training samples of the clients whose updates were aggregated")
    actor_seconds: float | None = column("training time of the arm: sum of the wall times of its cohorts (s)")
    warming: bool | None = column("whether a process trained the arm for the first time, which takes longer")
    bytes_up: int | None = column("bytes sent by all clients to the server")
    bytes_down: int | None = column("bytes sent by the server to all clients")
    simulated_seconds: float | None = column(
        "virtual time since the end of the previous round (s); null without devices"
    )
    idle: float | None = column("mean virtual time that aggregated clients waited for the round's end (s)")
    dropped: Int32 | None = column(
        "number of clients excluded: late, not needed, dropped out or out of memory; null without devices"
    )


@dataclass(frozen=True, kw_only=True)
class ClientRow(ArmRoundRow):
    """Local training of one client in one round of one arm."""

    client: Int32 = key("id of the client")
    samples: int | None = column("number of samples that the client trained on")
    loss: float | None = column("mean training loss over the client's local steps (nats)")
    seconds: float | None = column(
        "wall time of the client's local round (s); with vmap, an equal share of the cohort's"
    )
    sent_bytes: int | None = column("size of the update as sent, encrypted or not (bytes)")
    clipped: int | None = column(
        "number of values of the update clipped to the range of the encryption; null without encryption"
    )
    autoencoder_loss: float | None = column(
        "mean loss over the last epoch of the client's autoencoder, in the round in which the client trained it "
        "(nats per sample); only with the defence `vae`"
    )
    malicious: bool | None = column("whether the client poisons its data or update; unknown to the server")
    test_accuracy: float | None = column(
        "test accuracy of the new weights with the client's private part, 0..1, if any"
    )
    simulated_seconds: float | None = column("virtual time from the client's start until its update arrived (s)")
    staleness: Int32 | None = column("server steps since the client received its weights; null for synchronous rounds")
    status: str = key("'ok', or why the client was excluded; values that the client did not reach are then null")


@dataclass(frozen=True, kw_only=True)
class AttackRow(SampleRow):
    """One sample of an attacked update and the reconstruction matched to it."""

    batch_size: Int32 | None = column("number of samples from which the attacked update was computed")
    family: str | None = column("the attack's family, its name in results; null without a family")
    observes: str | None = column("input of the attack: 'gradient', 'update' or 'shown'")
    knowledge: tuple[str, ...] | None = column("grants of the threat model; empty for none")
    distortion: float | None = column("relative distance of the observed update from the undefended one")
    true_label: Int32 | None = column("class of the true image; null for regression")
    label: Int32 | None = column("class that the attack returns for the matched reconstruction")
    target_error: float | None = column("mean absolute error of the targets that the attack returns; regression only")
    label_baseline: float | None = column(
        "mean share of the batch's labels recovered by guessing all classes equally often; null for regression"
    )
    target_baseline: float | None = column(
        "mean absolute error of guessing the medians of the test split; regression only"
    )
    decoy_identified: float | None = column(
        "1 if the reconstruction is closer to a decoy than to other samples, else 0: another sample of the victim "
        "with the same class that is not in the update, as a control of `identified`"
    )
    parts_recovered: float | None = column(
        "share of the sample's parts recovered, 0..1: columns of a record, tokens of a text, or pixels of an image "
        "within 1 or 8 of 255 grey levels"
    )
    parts_baseline: float | None = column(
        "maximum share of parts recovered without the update, 0..1: this sample's parts by a guess, or other "
        "samples' parts by these reconstructions; for images also by the same values at random positions"
    )
    parts_evidence: float | None = column(
        "evidence that `parts_recovered` is not chance (nats), with as many independent parts as the variance over "
        "other samples implies; 0 if guesses recover as much"
    )
    columns: tuple[RecordColumn, ...] | None = column("results for each column of a record; null for images and texts")
    people: Int32 | None = column(
        "number of people known to the face recogniser; a random ranking has the right person in the top k with "
        "probability k / people"
    )
    objective: float | None = column("final value of the attack's objective, in the attack's own unit")
    fit: float | None = column(
        "distance between the gradients of the reconstruction and of the update, relative to a grey sample's, "
        "maximum over the whole gradient (ratio of sines) and its parts, minus that of the true samples; 0 if the "
        "reconstruction explains the update. With a defence's code: between the update and the "
        "defended update of the reconstruction; with noise, 1 if the update is less likely than at the true samples. "
        "Null after several local steps, or if unknown"
    )
    log_likelihood: float | None = column(
        "log density of the update at the reconstruction, by the noise that the defences declare, up to a constant "
        "(nats); null without declared noise"
    )
    true_log_likelihood: float | None = column("`log_likelihood` of the true samples")
    between: float | None = column(
        "`fit` of the midpoint between these samples and others that also explain the gradient: a high value means "
        "that such samples may be rare; infinite for texts. Null without such others"
    )
    iterations: Int32 | None = column("iterations of the attack")
    seconds: float | None = column("wall time for the whole batch (s)")
    status: str = key("'ok', 'diverged', 'not applicable', 'failed' or 'not played' (not enough time)")
    reason: Reason | None = column(_REASON)
    message: str | None = column("why the status is not ok, or which knowledge the attacker lacked")


@dataclass(frozen=True, kw_only=True)
class InferenceRow(AttackedRow):
    """Result of an attack that infers a property instead of samples."""

    metric: str = key("'auc', 'accuracy' or 'class_share'")
    value: float | None = column("value of the metric, 0..1; an accuracy is 0 or 1 for each victim")
    chance: float | None = column("value of the metric for an attacker without the update, 0..1")
    candidates: Int32 | None = column("number of candidates, questions or images from which the value is computed")
    control: float | None = column(
        "AUC of the same candidates on an update computed without the candidates, 0..1; AUC only"
    )
    scores: tuple[CandidateScore, ...] | None = column("scores of all candidates (ROC curve); AUC only")
    status: str = key("'ok', 'diverged', 'not applicable' or 'failed'")
    reason: Reason | None = column(_REASON)
    message: str | None = column("why the status is not ok, or which knowledge the attacker lacked")


@dataclass(frozen=True, kw_only=True)
class PrivateLayerRow(ArmRoundRow):
    """A layer that clients keep private, after one round."""

    layer: str = key("name of a convolution that clients keep private")
    distance: float | None = column("mean squared Euclidean distance between two clients' kernels, over all pairs")
    rank: float | None = column(
        "mean number of singular values that make up 99 % of the scaled kernels' sum, over the clients"
    )
    scale: float | None = column("mean absolute scale (gamma) of the channels, over the clients")
    bound_above: float | None = column(
        "theorem 1 of Gu 2021, up to a constant: upper bound on the root mean squared error of inverting one client's "
        "layer with another's, if their ranks are equal; mean over pairs of the first ten clients, null for one client"
    )
    bound_below: float | None = column(
        "the same theorem's lower bound, for outputs outside the range of the other client's layer"
    )


@dataclass(frozen=True, kw_only=True)
class WeightRow(ArmRoundRow):
    """Weight of one client's update in the aggregation of one round."""

    client: Int32 = key("id of the client")
    weight: float | None = column("weight of the client's update in the round; the weights of a round sum to 1")
    train_loss: float | None = column(
        "mean training loss over the client's local steps (nats), as reported to the server"
    )
    accuracy: float | None = column("mean accuracy of the client's model on the clients' validation samples, 0..1")


@dataclass(frozen=True, kw_only=True)
class ScoreRow(ArmRoundRow):
    """Score of one client's model on another client's samples."""

    model: Int32 = key("id of the client whose model was scored")
    validator: Int32 = key("id of the client that scored the model")
    loss: float | None = column("mean cross entropy on the validator's held-out samples (nats); NaN if not finite")
    accuracy: float | None = column("accuracy on the validator's held-out samples, 0..1")


@dataclass(frozen=True, kw_only=True)
class SecureSumRow(ArmRoundRow):
    """Secure aggregation of one round."""

    clients: Int32 | None = column("number of clients sampled for the round")
    advertised: Int32 | None = column("number of clients that sent their public keys")
    shared: Int32 | None = column("number of clients that sent shares of their secrets")
    sent: Int32 | None = column("number of clients that sent masked updates, which are in the sum of the updates")
    confirmed: Int32 | None = column(
        "number of clients that confirmed the list of clients whose updates are in the sum"
    )
    revealed: Int32 | None = column("number of clients that revealed the shares that unmask the sum of the updates")
    protocol_bytes: int | None = column(
        "keys, ciphertexts, tags and shares sent in both directions, without the masked updates (bytes)"
    )
    aborted: str | None = column("why the server skipped its step; null if the server made the step")


@dataclass(frozen=True, kw_only=True)
class TraceRow(AttackedRow):
    """Objective of an attack at one iteration."""

    iteration: Int32 = key("iteration of the attack")
    objective: float | None = column("value of the attack's objective at that iteration")


@dataclass(frozen=True, kw_only=True)
class ImageRow(SampleRow):
    """A true image with its reconstruction."""

    true: bytes = key("the true image (PNG)")
    reconstructed: bytes = key("the reconstruction matched to the true image (PNG)")


@dataclass(frozen=True, kw_only=True)
class TextRow(SampleRow):
    """A true text or record with its reconstruction."""

    true: tuple[str, ...] = key("the true sample: a text's tokens, or a record's columns")
    reconstructed: tuple[str, ...] = key("tokens or columns of the reconstruction matched to the true sample")
    right: tuple[bool, ...] = key(
        "which tokens or columns are reconstructed correctly; continuous columns within tolerance"
    )


@dataclass(frozen=True, kw_only=True)
class SnapshotRow(SampleRow):
    """A reconstruction at one iteration of the attack."""

    iteration: Int32 = key("iteration of the attack: 0, 10, 100, 1000 and so on, and the last one")
    image: bytes = key("the matched reconstruction at that iteration (PNG)")
    mse: float | None = column("mean squared error of its pixels in [0, 1]")
    wasserstein: float | None = column("Wasserstein-1 distance between its pixel values and those of the true image")


@dataclass(frozen=True, kw_only=True)
class PrivacyRow(ArmRow):
    """Privacy guarantee of one arm."""

    rounds: Int32 = key("maximum number of rounds of the arm, for which the guarantee is computed")
    defence: str | None = column("name of the mechanism; null for a row on the whole arm")
    epsilon: float | None = column("epsilon of (epsilon, delta)-differential privacy; null without a guarantee")
    delta: float | None = column("probability with which the guarantee may fail")
    unit: str | None = column("unit of protection: 'sample' or 'client'")
    adjacency: str | None = column("adjacency of neighbouring data sets, and the protected object")
    against: str | None = column("attackers against which the guarantee holds")
    mechanism: str | None = column("description of the mechanism with its parameters")
    accountant: str | None = column("'pld' or 'rdp'")
    conversion: str | None = column("how the accountant computes epsilon")
    advantage: float | None = column("maximum of true minus false positive rate of membership inference, 0..1")
    note: str | None = column("why there is no guarantee, or what weakens the guarantee")


@dataclass(frozen=True, kw_only=True)
class ProvedRow(ArmRow):
    """Bound on one event, proved by the guarantee of a mechanism."""

    attack: str = key("the attack's name in the scenario")
    defence: str = key("name of the mechanism")
    unit: str = key("unit of protection: 'sample' or 'client'")
    chance: float = key("probability of an event if the unit is absent, 0..1")
    present: float = key("maximum probability of that event if the unit is present, over all observations of a victim")
    another: float = key("maximum probability of that event if the unit is replaced by another unit")


@dataclass(frozen=True, kw_only=True)
class PartitionRow:
    """Number of a client's samples of one class."""

    client: Int32 = key("id of the client")
    label: Int32 = key("class")
    class_name: str | None = column("name of the class")
    count: int = key("number of the client's samples of that class")
