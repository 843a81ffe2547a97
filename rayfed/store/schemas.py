"""Arrow schemas of a run's tables, with each column's meaning and unit in its metadata.

A table is a folder of Parquet files, one per round. Explicit schemas keep the type of a column that has only nulls, so
the files of one table can always be concatenated.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from rayfed.metrics.known import METRICS
from rayfed.metrics.measures import MEASURES
from rayfed.privacy.tradeoff import PRIORS
from rayfed.reasons import Reason

_string, _int, _long, _real, _bytes = pa.string(), pa.int32(), pa.int64(), pa.float64(), pa.binary()


def _key(name: str, type: pa.DataType, description: str) -> pa.Field:
    """Return the field of a non-nullable column."""
    return pa.field(name, type, nullable=False, metadata={"description": description})


def _value(name: str, type: pa.DataType, description: str) -> pa.Field:
    """Return the field of a nullable column; null means not measured or not applicable."""
    return pa.field(name, type, nullable=True, metadata={"description": description})


ANSWERED = "ok", "diverged"
"""Statuses with which attacks return a result."""
UNPLAYED = "not played"
"""Status of attacks that were not run because the time budget was too small."""
WANT_OF_TIME = "not enough time"
"""Start of the message of an attack that was not run; the time that the attack needs may follow."""
VERSUS = " vs "
"""Separator between an arm and its opponent (poisoning attack) in the column `arm`."""
_ARM = _key("arm", _string, "name of the arm, a training with one chain of defences")
_ROUND = _key("round", _int, "communication round, from 0; pages and the terminal count from 1")
_ATTACKED = (
    _ARM,
    _ROUND,
    _key("attack", _string, "the attack's label in the scenario, or its name without a label"),
    _key("victim", _int, "id of the client whose update was attacked"),
    _key(
        "repeat", _int, "number of the attack on that victim in that round, from 0; each attack has its own random seed"
    ),
)
_SAMPLE = _key("sample", _int, "index of the true image in the victim's batch")

_SCORED = pa.struct(
    [
        pa.field("kind", _string, metadata={"description": "'member' or 'non-member'"}),
        pa.field("sample", _long, metadata={"description": "index of the candidate in its split"}),
        pa.field("score", _real),
        pa.field("control", _real, metadata={"description": "score on an update computed without any candidate"}),
    ]
)

_COLUMN = pa.struct(
    [
        pa.field("name", _string),
        pa.field(
            "found", pa.bool_(), metadata={"description": "whether the column's value was recovered, within tolerance"}
        ),
        pa.field(
            "guess", _real, metadata={"description": "share of other records for which the best constant is right"}
        ),
    ]
)

_REASON = _value(
    "reason",
    _string,
    f"why an attack could not use an update fully: '{Reason.ENCRYPTED}' or '{Reason.MASKED}' (the attacker cannot read "
    f"it), '{Reason.CODE_NOT_RUN}' or '{Reason.CODE_PARTLY_USED}' (of the defences), or '{Reason.BUFFERS_NOT_SOLVED}' "
    "(the returned buffers could determine the samples, but no samples were found that fit); null for another reason",
)

_METRICS = [
    _value(metric.name, _real, metric.description)
    for metric in sorted(METRICS.values(), key=lambda metric: metric.compares != "labels")
]
"""Columns of the metrics; metrics with one value per batch come first."""

TABLES: dict[str, pa.Schema] = {
    "rounds": pa.schema(
        [
            _ARM,
            _ROUND,
            _value("train_loss", _real, "mean training loss of the round's clients, weighted by samples"),
            _value("test_loss", _real, "mean loss on the test set (cross entropy in nats); null if not evaluated"),
            _value(
                "test_accuracy",
                _real,
                "share of the test set's labels predicted correctly, 0..1; null if not evaluated or for regression",
            ),
            _value("test_error", _real, "mean absolute error on the test set; regression only"),
            _value(
                "test_perplexity",
                _real,
                "exponential of the mean cross entropy of the test set's tokens; language models only",
            ),
            _value("test_iou", _real, "mean intersection over union of the classes on the test set; masks only"),
            _value("train_accuracy", _real, "share of all clients' own samples classified correctly, 0..1"),
            _value("non_member_accuracy", _real, "test accuracy of a non-member with a random private part, 0..1"),
            _value(
                "non_member_mean_accuracy",
                _real,
                "test accuracy of a non-member with the mean of the clients' private parts but random keys, 0..1",
            ),
            _value("backdoor_accuracy", _real, "share of test images with the trigger classified as its target, 0..1"),
            _value(
                "baseline_accuracy",
                _real,
                "test accuracy of always predicting the majority class, 0..1: 95 % of test sets of this size have less",
            ),
            _value("baseline_error", _real, "mean absolute error of always predicting the test set's median"),
            _value("baseline_perplexity", _real, "perplexity of predicting each token's frequency in the test set"),
            _value("baseline_iou", _real, "intersection over union of predicting the majority class at every pixel"),
            _value("clients", _int, "number of clients whose updates were aggregated"),
            _value("samples", _long, "number of training samples of the clients whose updates were aggregated"),
            _value("actor_seconds", _real, "training time of the arm: sum of the wall times of its cohorts (s)"),
            _value("warming", pa.bool_(), "whether a process trained the arm for the first time, which takes longer"),
            _value("bytes_up", _long, "bytes sent by all clients to the server"),
            _value("bytes_down", _long, "bytes sent by the server to all clients"),
            _value(
                "simulated_seconds", _real, "virtual time since the end of the previous round (s); null without devices"
            ),
            _value("idle", _real, "mean virtual time that aggregated clients waited for the round's end (s)"),
            _value(
                "dropped",
                _int,
                "number of clients excluded: late, not needed, dropped out or out of memory; null without devices",
            ),
        ]
    ),
    "clients": pa.schema(
        [
            _ARM,
            _ROUND,
            _key("client", _int, "id of the client"),
            _value("samples", _long, "number of samples that the client trained on"),
            _value("loss", _real, "mean training loss over the client's local steps (nats)"),
            _value(
                "seconds", _real, "wall time of the client's local round (s); with vmap, an equal share of the cohort's"
            ),
            _value("sent_bytes", _long, "size of the update as sent, encrypted or not (bytes)"),
            _value(
                "clipped",
                _long,
                "number of values of the update clipped to the range of the encryption; null without encryption",
            ),
            _value("malicious", pa.bool_(), "whether the client poisons its data or update; unknown to the server"),
            _value(
                "test_accuracy", _real, "test accuracy of the new weights with the client's private part, 0..1, if any"
            ),
            _value("simulated_seconds", _real, "virtual time from the client's start until its update arrived (s)"),
            _value(
                "staleness", _int, "server steps since the client received its weights; null for synchronous rounds"
            ),
            _key(
                "status",
                _string,
                "'ok', or why the client was excluded; values that the client did not reach are then null",
            ),
        ]
    ),
    "attacks": pa.schema(
        [
            *_ATTACKED,
            _SAMPLE,
            _value("batch_size", _int, "number of samples from which the attacked update was computed"),
            _value("family", _string, "the attack's family, its name in results; null without a family"),
            _value("observes", _string, "input of the attack: 'gradient', 'update' or 'shown'"),
            _value("knowledge", pa.list_(_string), "grants of the threat model; empty for none"),
            _value("distortion", _real, "relative distance of the observed update from the undefended one"),
            _value("true_label", _int, "class of the true image; null for regression"),
            _value("label", _int, "class that the attack returns for the matched reconstruction"),
            _value(
                "target_error", _real, "mean absolute error of the targets that the attack returns; regression only"
            ),
            _value(
                "label_baseline",
                _real,
                "mean share of the batch's labels recovered by guessing all classes equally often; null for regression",
            ),
            _value(
                "target_baseline",
                _real,
                "mean absolute error of guessing the medians of the test split; regression only",
            ),
            *_METRICS,
            _value(
                "decoy_identified",
                _real,
                "1 if the reconstruction is closer to a decoy than to other samples, else 0: another sample of the "
                "victim with the same class that is not in the update, as a control of `identified`",
            ),
            _value(
                "parts_recovered",
                _real,
                "share of the sample's parts recovered, 0..1: columns of a record, tokens of a text, or pixels of an "
                "image within 1 or 8 of 255 grey levels",
            ),
            _value(
                "parts_baseline",
                _real,
                "maximum share of parts recovered without the update, 0..1: this sample's parts by a guess, or other "
                "samples' parts by these reconstructions; for images also by the same values at random positions",
            ),
            _value(
                "parts_evidence",
                _real,
                "evidence that `parts_recovered` is not chance (nats), with as many independent parts as the variance "
                "over other samples implies; 0 if guesses recover as much",
            ),
            _value("columns", pa.list_(_COLUMN), "results for each column of a record; null for images and texts"),
            _value(
                "people",
                _int,
                "number of people known to the face recogniser; a random ranking has the right person in the top k "
                "with probability k / people",
            ),
            _value("objective", _real, "final value of the attack's objective, in the attack's own unit"),
            _value(
                "fit",
                _real,
                "distance between the gradients of the reconstruction and of the update, relative to a grey sample's, "
                "maximum over the whole gradient (ratio of sines) and its parts, minus that of the true samples; 0 if "
                "the reconstruction explains the update. With a defence's code: over the values that the defence "
                "leaves unchanged, and 1 if its noise does not explain the others. Null after several local steps, or "
                "if unknown",
            ),
            _value(
                "between",
                _real,
                "`fit` of the midpoint between these samples and others that also explain the gradient: a high value "
                "means that such samples may be rare; infinite for texts. Null with defences or without such others",
            ),
            _value("iterations", _int, "iterations of the attack"),
            _value("seconds", _real, "wall time for the whole batch (s)"),
            _key("status", _string, "'ok', 'diverged', 'not applicable', 'failed' or 'not played' (not enough time)"),
            _REASON,
            _value("message", _string, "why the status is not ok, or which knowledge the attacker lacked"),
        ]
    ),
    "inferences": pa.schema(
        [
            *_ATTACKED,
            _key("metric", _string, "'auc', 'accuracy' or 'class_share'"),
            _value("value", _real, "value of the metric, 0..1; an accuracy is 0 or 1 for each victim"),
            _value("chance", _real, "value of the metric for an attacker without the update, 0..1"),
            _value("candidates", _int, "number of candidates, questions or images from which the value is computed"),
            _value(
                "control",
                _real,
                "AUC of the same candidates on an update computed without the candidates, 0..1; AUC only",
            ),
            _value("scores", pa.list_(_SCORED), "score of every candidate, for the ROC curve; AUC only"),
            _key("status", _string, "'ok', 'diverged', 'not applicable' or 'failed'"),
            _REASON,
            _value("message", _string, "why the status is not ok, or which knowledge the attacker lacked"),
        ]
    ),
    "private": pa.schema(
        [
            _ARM,
            _ROUND,
            _key("layer", _string, "name of a convolution that clients keep private"),
            _value("distance", _real, "mean squared Euclidean distance between two clients' kernels, over all pairs"),
            _value(
                "rank",
                _real,
                "mean number of singular values that make up 99 % of the scaled kernels' sum, over the clients",
            ),
            _value("scale", _real, "mean absolute scale (gamma) of the channels, over the clients"),
        ]
    ),
    "weights": pa.schema(
        [
            _ARM,
            _ROUND,
            _key("client", _int, "id of the client"),
            _value("weight", _real, "weight of the client's update in the round; the weights of a round sum to 1"),
            _value(
                "train_loss",
                _real,
                "mean training loss over the client's local steps (nats), as reported to the server",
            ),
            _value("accuracy", _real, "mean accuracy of the client's model on the clients' validation samples, 0..1"),
        ]
    ),
    "scores": pa.schema(
        [
            _ARM,
            _ROUND,
            _key("model", _int, "id of the client whose model was scored"),
            _key("validator", _int, "id of the client that scored the model"),
            _value("loss", _real, "mean cross entropy on the validator's held-out samples (nats); NaN if not finite"),
            _value("accuracy", _real, "accuracy on the validator's held-out samples, 0..1"),
        ]
    ),
    "secure_sums": pa.schema(
        [
            _ARM,
            _ROUND,
            _value("clients", _int, "number of clients sampled for the round"),
            _value("advertised", _int, "number of clients that sent their public keys"),
            _value("shared", _int, "number of clients that sent shares of their secrets"),
            _value("sent", _int, "number of clients that sent masked updates, which are in the sum of the updates"),
            _value(
                "confirmed", _int, "number of clients that confirmed the list of clients whose updates are in the sum"
            ),
            _value("revealed", _int, "number of clients that revealed the shares that unmask the sum of the updates"),
            _value(
                "protocol_bytes",
                _long,
                "keys, ciphertexts, tags and shares sent in both directions, without the masked updates (bytes)",
            ),
            _value("aborted", _string, "why the server skipped its step; null if the server made the step"),
        ]
    ),
    "traces": pa.schema(
        [
            *_ATTACKED,
            _key("iteration", _int, "iteration of the attack"),
            _value("objective", _real, "value of the attack's objective at that iteration"),
        ]
    ),
    "images": pa.schema(
        [
            *_ATTACKED,
            _SAMPLE,
            _key("true", _bytes, "the true image (PNG)"),
            _key("reconstructed", _bytes, "the reconstruction matched to the true image (PNG)"),
        ]
    ),
    "texts": pa.schema(
        [
            *_ATTACKED,
            _SAMPLE,
            _key("true", pa.list_(_string), "the true sample: a text's tokens, or a record's columns"),
            _key(
                "reconstructed", pa.list_(_string), "tokens or columns of the reconstruction matched to the true sample"
            ),
            _key(
                "right",
                pa.list_(pa.bool_()),
                "which tokens or columns are reconstructed correctly; continuous columns within tolerance",
            ),
        ]
    ),
    "snapshots": pa.schema(
        [
            *_ATTACKED,
            _SAMPLE,
            _key("iteration", _int, "iteration of the attack: 0, 10, 100, 1000 and so on, and the last one"),
            _key("image", _bytes, "the matched reconstruction at that iteration (PNG)"),
        ]
    ),
    "privacy": pa.schema(
        [
            _ARM,
            _key("rounds", _int, "maximum number of rounds of the arm, for which the guarantee is computed"),
            _value("defence", _string, "name of the mechanism; null for a row on the whole arm"),
            _value("epsilon", _real, "epsilon of (epsilon, delta)-differential privacy; null without a guarantee"),
            _value("delta", _real, "probability with which the guarantee may fail"),
            _value("unit", _string, "unit of protection: 'sample' or 'client'"),
            _value("adjacency", _string, "adjacency of neighbouring data sets, and the protected object"),
            _value("against", _string, "attackers against which the guarantee holds"),
            _value("mechanism", _string, "description of the mechanism with its parameters"),
            _value("accountant", _string, "'pld' or 'rdp'"),
            _value("conversion", _string, "how the accountant computes epsilon"),
            *(
                _value(
                    f"rero_{one_in}",
                    _real,
                    f"bound on reconstruction robustness (ReRo), 0..1: maximum success of a guess with prior 1/{one_in}"
                    + "; also the maximum true positive rate of membership inference at that false positive rate",
                )
                for one_in in PRIORS
            ),
            _value("advantage", _real, "maximum of true minus false positive rate of membership inference, 0..1"),
            _value("note", _string, "why there is no guarantee, or what weakens the guarantee"),
        ]
    ),
    "proved": pa.schema(
        [
            _ARM,
            _key("attack", _string, "the attack's name in the scenario"),
            _key("defence", _string, "name of the mechanism"),
            _key("unit", _string, "unit of protection: 'sample' or 'client'"),
            _key("chance", _real, "probability of an event if the unit is absent, 0..1"),
            _key(
                "present",
                _real,
                "maximum probability of that event if the unit is present, over all observations of a victim",
            ),
            _key("another", _real, "maximum probability of that event if the unit is replaced by another unit"),
        ]
    ),
    "partition": pa.schema(
        [
            _key("client", _int, "id of the client"),
            _key("label", _int, "class"),
            _value("class_name", _string, "name of the class"),
            _key("count", _long, "number of the client's samples of that class"),
        ]
    ),
}
"""Table name -> schema. `privacy`, `proved` and `partition` have one part, number 0; other tables have one part per "
"round."""

TRIAL_FIELDS = [
    _value("trial", _string, "name of the trial; its run is in the sweep's folder `trials`"),
    _value("repeat", _int, "number of the repeat, from 0; each repeats the same values with the next seed"),
    _value("seed", _long, "seed of the trial"),
    _value("status", _string, "'finished', 'stopped' (by the scheduler) or 'failed'"),
    _value("error", _string, "why the trial failed; null if the trial did not fail"),
    _value("run", _string, "the trial's run folder, relative to the sweep's"),
]
"""Columns of the outcomes that describe a trial of a sweep."""
OUTCOME_FIELDS = [
    _value("arm", _string, "name of the arm in the scenario"),
    _value("attack", _string, "the attack's name in the scenario; null if no attack was run against the arm"),
    _value("defences", _string, "the arm's defences with their parameters"),
    _value("rounds", _int, "number of rounds of the arm"),
    _value("state", _string, "state of the run: 'finished', or why it is not finished"),
    _value("images", _int, "number of samples from which the leakage is computed"),
    _value("batch_size", _int, "samples in an attacked update"),
    _value("observes", _string, "input of the attack: 'gradient', 'update' or 'shown'"),
    _value("knowledge", pa.list_(_string), "grants of the threat model; empty for none"),
    _value("delta", _real, "delta of the guarantee"),
    _value("epsilon_unit", _string, "unit of protection of the guarantee: 'sample' or 'client'"),
    _value("epsilon_adjacency", _string, "adjacency of neighbouring data sets, and the protected object"),
    _value("epsilon_against", _string, "attackers against which the guarantee holds"),
    _value(
        "result",
        _string,
        "result of the attack on the arm, before the comparison with an arm without a defence; or 'not applicable'",
    ),
    _value(
        "doubt",
        _string,
        "why the result or verdict is 'inconclusive' or 'not measured': a value of `rayfed.reasons.Reason`; null for "
        "another reason",
    ),
    _value("reason", _string, "why the result or verdict is 'inconclusive' or 'not measured', as text"),
    _value("max_similarity", _real, "maximum PSNR (dB) or share of parts of the reconstructions"),
    _value("baseline_similarity", _real, "PSNR (dB) or share of parts of the best guess (baseline) at the same sample"),
    _value(
        "explains",
        pa.bool_(),
        "whether an attacker with the defence's code found, for each sample, a reconstruction that explains the update",
    ),
    _value("verdict", _string, "verdict over all attacks on this arm, by the criteria of the audit"),
    _value("inferred_low", _real, "lower end of the 95 % interval of `inferred`, over a run's candidates or victims"),
    _value("attacked", _long, "number of updates attacked"),
    _value("without_result", _long, "number of attacked updates on which the attack diverged or failed"),
    _value(
        "baseline_accuracy",
        _real,
        "test accuracy of always predicting the majority class, 0..1: 95 % of test sets of this size have less",
    ),
    _value("train_seconds_half", _real, "half of the 95 % interval of the training time, over the rounds (s)"),
    *(pa.field(name, _real) for name in MEASURES),
]

OUTCOME_COLUMNS = tuple(field.name for field in [*TRIAL_FIELDS, *OUTCOME_FIELDS])
"""All columns of the outcomes except swept fields."""

_IMAGE = ("arm", "round", "attack", "victim", "repeat", "sample")


def image_key(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns that identify an image in a row of `attacks`, `images` or `snapshots`."""
    return {column: row[column] for column in _IMAGE}
