"""Arrow schemas of a run's tables, with each column's meaning and unit in its metadata.

A table is a folder of Parquet parts, one part a round. Explicit schemas keep the type of a column that holds
nothing but nulls, so the parts of one table always fit together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from rayfed.metrics.known import METRICS
from rayfed.metrics.measures import MEASURES
from rayfed.privacy.tradeoff import PRIORS

_string, _int, _long, _real, _bytes = pa.string(), pa.int32(), pa.int64(), pa.float64(), pa.binary()


def _key(name: str, type: pa.DataType, description: str) -> pa.Field:
    """Return the field of a non-nullable column."""
    return pa.field(name, type, nullable=False, metadata={"description": description})


def _value(name: str, type: pa.DataType, description: str) -> pa.Field:
    """Return the field of a nullable column; null is not measured, or not applicable."""
    return pa.field(name, type, nullable=True, metadata={"description": description})


ANSWERED = "ok", "diverged"
"""Statuses of attacks that gave an answer."""
UNPLAYED = "not played"
"""Status of the rows of attacks for which there was no time."""
WANT_OF_TIME = "for want of time"
"""What their messages begin with, before the time that they need."""
VERSUS = " vs "
"""Between the names of an arm and of its opponent, in the column `arm`."""
_ARM = _key("arm", _string, "the arm of the scenario: one training with its chain of defences")
_ROUND = _key("round", _int, "communication round, from 0; pages and the terminal count from 1")
_ATTACKED = (
    _ARM,
    _ROUND,
    _key("attack", _string, "the attack's name in the scenario"),
    _key("victim", _int, "id of the client whose update was attacked"),
    _key("repeat", _int, "which of the attacks on that victim in that round, from 0: each has its own randomness"),
)
_SAMPLE = _key("sample", _int, "index of the true image in the victim's batch")

_SCORED = pa.struct(
    [
        pa.field("kind", _string, metadata={"description": "'member' or 'non-member'"}),
        pa.field("sample", _long, metadata={"description": "number in the split that it is from"}),
        pa.field("score", _real),
        pa.field("control", _real, metadata={"description": "score on an update behind which no candidate is"}),
    ]
)

_COLUMN = pa.struct(
    [
        pa.field("name", _string),
        pa.field("found", pa.bool_(), metadata={"description": "whether its value was found, or one within bounds"}),
        pa.field("guess", _real, metadata={"description": "share of other records that the best constant finds"}),
    ]
)

_METRICS = [
    _value(metric.name, _real, metric.description)
    for metric in sorted(METRICS.values(), key=lambda metric: metric.compares != "labels")
]
"""What is one for a whole batch comes first."""

TABLES: dict[str, pa.Schema] = {
    "rounds": pa.schema(
        [
            _ARM,
            _ROUND,
            _value("train_loss", _real, "mean training loss of the round's clients, weighted by samples"),
            _value("test_loss", _real, "mean loss on the test set (cross entropies in nats); null where not evaluated"),
            _value(
                "test_accuracy",
                _real,
                "share of the test set's labels that are right, 0..1; null where not evaluated, and of quantities",
            ),
            _value("test_error", _real, "mean absolute error on the test set, where targets are quantities; else null"),
            _value(
                "test_perplexity",
                _real,
                "exponential of the mean cross entropy of the test set's tokens, of language models; null elsewhere",
            ),
            _value(
                "test_iou",
                _real,
                "mean over the classes of intersection over union of the test set's pixels, of masks; null elsewhere",
            ),
            _value("train_accuracy", _real, "share of all clients' own samples classified right, 0..1; null likewise"),
            _value("stranger_accuracy", _real, "of a non-member, who has a random private part, 0..1; null likewise"),
            _value("stranger_mean_accuracy", _real, "the same with the mean of the clients' own, keys still random"),
            _value(
                "backdoor_accuracy", _real, "share of test images with the trigger taken for its target, 0..1; likewise"
            ),
            _value("guessing_accuracy", _real, "most that naming one class gets on 95 % of such test sets; likewise"),
            _value("guessing_error", _real, "mean absolute error of the test set's median, beside `test_error`"),
            _value("guessing_perplexity", _real, "that of how often each token occurs there, beside `test_perplexity`"),
            _value("guessing_iou", _real, "that of one class at every pixel, beside `test_iou`"),
            _value("clients", _int, "clients whose updates were aggregated"),
            _value("samples", _long, "training samples behind those updates"),
            _value("actor_seconds", _real, "training of the arm: its cohorts' wall times on client actors, summed (s)"),
            _value("warming", pa.bool_(), "whether a process trained the arm for the first time, which takes longer"),
            _value("bytes_up", _long, "sent by all clients to the server (bytes)"),
            _value("bytes_down", _long, "sent by the server to all clients (bytes)"),
            _value(
                "simulated_seconds", _real, "virtual time since the end of the round before (s); null without devices"
            ),
            _value("idle", _real, "mean virtual time that aggregated clients waited for the round's end (s)"),
            _value(
                "dropped", _int, "clients left out: late, not needed, dropped out, too little memory; null likewise"
            ),
        ]
    ),
    "clients": pa.schema(
        [
            _ARM,
            _ROUND,
            _key("client", _int, "id of the client"),
            _value("samples", _long, "samples that the client trained on"),
            _value("loss", _real, "mean training loss over the client's local steps (nats)"),
            _value(
                "seconds", _real, "wall time of the client's local round; under vmap an equal part of the cohort's (s)"
            ),
            _value("sent_bytes", _long, "size of the update as sent, encrypted or not (bytes)"),
            _value("clipped", _long, "values of the update beyond the clip bounds of its encryption; null without"),
            _value("malicious", pa.bool_(), "whether it poisons its data or update; nobody in the federation is told"),
            _value("test_accuracy", _real, "of the new weights with the client's private part, 0..1; null without one"),
            _value("simulated_seconds", _real, "virtual time from its start until its update arrived (s)"),
            _value("staleness", _int, "steps of the server since it was sent its weights; null where rounds wait"),
            _key("status", _string, "'ok', or why it is left out of the round: all that it did not do is null then"),
        ]
    ),
    "attacks": pa.schema(
        [
            *_ATTACKED,
            _SAMPLE,
            _value("batch_size", _int, "samples behind the attacked update"),
            _value("observes", _string, "what the attack was given: 'gradient', 'update' or 'shown'"),
            _value("knowledge", _string, "what else the threat model grants, comma-joined; empty for nothing"),
            _value("distortion", _real, "relative distance of the observed update from the undefended one"),
            _value("true_label", _int, "class of the true image; null where labels are numbers"),
            _value("label", _int, "class that the attack states for the matched reconstruction"),
            _value("target_error", _real, "mean absolute error of the numbers that it states; null of classes"),
            _value(
                "label_guess_accuracy",
                _real,
                "share of the batch's labels that naming every class equally often finds, on average; null of numbers",
            ),
            _value("target_guess_error", _real, "mean absolute error of naming the test split's medians, beside it"),
            *_METRICS,
            _value(
                "decoy_told_apart",
                _real,
                "1 where it is nearer to another sample of the victim's, of the same class and not behind what was "
                "seen, than to other samples: what is told apart without it",
            ),
            _value(
                "parts_found",
                _real,
                "share of the sample's parts found, 0..1: a record's columns, a text's tokens, an image's pixels to 1 "
                "or to 8 grey levels of 255",
            ),
            _value(
                "parts_guessed",
                _real,
                "the most that is found of parts without the update: of this sample's by a guess, or of other samples' "
                "by these reconstructions; of images, also by the reconstruction's values in random places",
            ),
            _value(
                "parts_evidence",
                _real,
                "evidence against so much by chance (nats), of as many independent parts as the spread over other "
                "samples amounts to; 0 where guesses find as much",
            ),
            _value("columns", pa.list_(_COLUMN), "a record's columns; null of other samples"),
            _value("people", _int, "classes that the recogniser tells apart: chance is k of so many"),
            _value("objective", _real, "the attack's own final objective; its unit is the attack's"),
            _value(
                "fit",
                _real,
                "angle between the gradient of what it found and the one seen, beside a grey sample's (ratio of "
                "sines), or that of the values in which it is largest: 0 where it explains that; with a defence's code "
                "of the values that are left as they are, and 1 where noise does not explain the rest; null after "
                "several local steps, or where nothing is known",
            ),
            _value(
                "between",
                _real,
                "`fit` of what lies halfway from the samples to others that explain the gradient: where that does not, "
                "such samples may be few, and infinite of texts, between which nothing lies; null behind defences, and "
                "where nothing else was found",
            ),
            _value("iterations", _int, "iterations that the attack made"),
            _value("seconds", _real, "wall time for the whole batch (s)"),
            _key("status", _string, "'ok', 'diverged', 'not applicable', 'failed' or 'not played' (there was no time)"),
            _value("message", _string, "why the status is not ok, or what the attacker had to do without"),
        ]
    ),
    "inferences": pa.schema(
        [
            *_ATTACKED,
            _key("metric", _string, "'auc', 'accuracy' or 'class_share'"),
            _value("value", _real, "the metric, 0..1; an accuracy is 0 or 1 for each victim"),
            _value("chance", _real, "the metric of an attacker who has seen nothing, 0..1"),
            _value("candidates", _int, "statements behind the value: candidates, questions or images"),
            _value("control", _real, "an AUC's control: of the same candidates on an update without them, 0..1"),
            _value("scores", pa.list_(_SCORED), "every candidate's score, from which the ROC curve is; null likewise"),
            _key("status", _string, "'ok', 'diverged', 'not applicable' or 'failed'"),
            _value("message", _string, "why the status is not ok, or what the attacker had to do without"),
        ]
    ),
    "private": pa.schema(
        [
            _ARM,
            _ROUND,
            _key("layer", _string, "a convolution that clients keep, by its name in the model"),
            _value("distance", _real, "squared Euclidean distance of two clients' kernels, mean over all pairs"),
            _value(
                "rank", _real, "largest singular values of the scaled kernels that make up 99 % of all, client mean"
            ),
            _value("scale", _real, "mean absolute scale (gamma) of the channels, mean over the clients"),
        ]
    ),
    "weights": pa.schema(
        [
            _ARM,
            _ROUND,
            _key("client", _int, "id of the client"),
            _value("weight", _real, "its update's in the round's step; a round's sum to 1"),
            _value("train_loss", _real, "mean training loss over its local steps (nats), as the server was told"),
            _value("accuracy", _real, "of its model on a client's validation samples, mean over the clients, 0..1"),
        ]
    ),
    "scores": pa.schema(
        [
            _ARM,
            _ROUND,
            _key("model", _int, "id of the client whose model was scored"),
            _key("validator", _int, "id of the client that scored it"),
            _value("loss", _real, "mean cross entropy on the validator's held-out samples (nats); NaN if not finite"),
            _value("accuracy", _real, "share of them that the model classifies right, 0..1"),
        ]
    ),
    "secure_sums": pa.schema(
        [
            _ARM,
            _ROUND,
            _value("clients", _int, "clients drawn for the round"),
            _value("advertised", _int, "those that were still there to send their public keys"),
            _value("shared", _int, "to share their secrets"),
            _value("sent", _int, "to send their masked updates: these are in the sum"),
            _value("confirmed", _int, "to confirm whose updates these are"),
            _value("revealed", _int, "to reveal the shares that unmask it"),
            _value(
                "protocol_bytes", _long, "keys, boxes, tags and shares, both ways, beside the masked updates (bytes)"
            ),
            _value("aborted", _string, "why the server took no step; null where it did"),
        ]
    ),
    "traces": pa.schema(
        [
            *_ATTACKED,
            _key("iteration", _int, "iteration of the attack"),
            _value("objective", _real, "the attack's objective there"),
        ]
    ),
    "images": pa.schema(
        [
            *_ATTACKED,
            _SAMPLE,
            _key("true", _bytes, "the true image (PNG)"),
            _key("reconstructed", _bytes, "the reconstruction matched to it (PNG)"),
        ]
    ),
    "texts": pa.schema(
        [
            *_ATTACKED,
            _SAMPLE,
            _key("true", pa.list_(_string), "the true sample in words: a text's tokens, or a record's columns"),
            _key("reconstructed", pa.list_(_string), "the reconstruction matched to it, likewise"),
            _key("right", pa.list_(pa.bool_()), "which of these are right; continuous columns within bounds"),
        ]
    ),
    "snapshots": pa.schema(
        [
            *_ATTACKED,
            _SAMPLE,
            _key("iteration", _int, "iteration of the attack: 0, 10, 100, 1000 and so on, and the last one"),
            _key("image", _bytes, "what the attack held then of the reconstruction matched to the true image (PNG)"),
        ]
    ),
    "privacy": pa.schema(
        [
            _ARM,
            _key("rounds", _int, "rounds that the account is about: those that the arm plays at most"),
            _value("defence", _string, "the mechanism; null where the row speaks of the whole arm"),
            _value("epsilon", _real, "of (epsilon, delta)-differential privacy; null where nothing is guaranteed"),
            _value("delta", _real, "the probability with which the guarantee may fail"),
            _value("unit", _string, "what is hidden: 'sample' or 'client'"),
            _value("adjacency", _string, "what the guarantee protects, and between which neighbouring data sets"),
            _value("against", _string, "who cannot tell"),
            _value("mechanism", _string, "what was done, with its numbers"),
            _value("accountant", _string, "'pld' or 'rdp'"),
            _value("conversion", _string, "how the accountant comes to an epsilon"),
            *(
                _value(
                    f"rero_{one_in}",
                    _real,
                    f"most that a guess at the unit's secret is right which was right 1 in {one_in} before, 0..1 (ReRo)"
                    + "; the true positive rate of a membership test, too, at that false positive rate",
                )
                for one_in in PRIORS
            ),
            _value("advantage", _real, "most that a membership test's true are above its false positives, 0..1"),
            _value("note", _string, "why there is no guarantee, or what weakens it"),
        ]
    ),
    "proved": pa.schema(
        [
            _ARM,
            _key("attack", _string, "the attack's name in the scenario"),
            _key("defence", _string, "the mechanism"),
            _key("unit", _string, "what is hidden: 'sample' or 'client'"),
            _key("chance", _real, "probability of an event where the unit is hidden, 0..1"),
            _key("present", _real, "most that it is where the unit is there, for all that the attack sees of a victim"),
            _key("another", _real, "most that it is where the unit is another one"),
        ]
    ),
    "partition": pa.schema(
        [
            _key("client", _int, "id of the client"),
            _key("label", _int, "class"),
            _value("class_name", _string, "the class in words"),
            _key("count", _long, "samples of that class at that client"),
        ]
    ),
}
"""Table name -> schema. `privacy`, `proved` and `partition` have one part, number 0; the others have one a round."""

TRIAL_FIELDS = [
    _value("trial", _string, "name of the trial; its run is in the sweep's folder `trials`"),
    _value("repeat", _int, "number of the repeat, from 0: the same values with the next seed"),
    _value("seed", _long, "seed of the trial"),
    _value("status", _string, "'finished', 'stopped' (by the scheduler) or 'failed'"),
    _value("error", _string, "why the trial failed; null where it did not"),
    _value("run", _string, "the trial's run folder, relative to the sweep's"),
]
"""What a sweep knows of a trial: `status` is 'finished', 'stopped' (by the scheduler) or 'failed'; `run` is its run
folder, relative to the sweep's."""
OUTCOME_FIELDS = [
    _value("arm", _string, "the arm of the scenario"),
    _value("attack", _string, "the attack's name in the scenario; null where no attack met the arm"),
    _value("defences", _string, "the arm's defences with their parameters"),
    _value("rounds", _int, "rounds that the arm plays"),
    _value("state", _string, "the run's state: 'finished', or why it has not come to its end"),
    _value("images", _int, "samples behind the leakage"),
    _value("batch_size", _int, "samples behind an attacked update"),
    _value("observes", _string, "what the attack was given: 'gradient', 'update' or 'shown'"),
    _value("knowledge", _string, "what else the threat model grants, comma-joined; empty for nothing"),
    _value("delta", _real, "delta of the epsilon"),
    _value("epsilon_unit", _string, "what the epsilon hides: 'sample' or 'client'"),
    _value("epsilon_adjacency", _string, "what the guarantee protects, and between which neighbouring data sets"),
    _value("epsilon_against", _string, "who cannot tell"),
    _value(
        "answer",
        _string,
        "what this attack came to on this arm, before it is set beside an arm without a defence; or 'not applicable'",
    ),
    _value("why", _string, "why the answer says nothing, where it is 'inconclusive' or 'not measured'"),
    _value("closest", _real, "PSNR (dB), or share of parts, of the closest reconstruction behind the answer"),
    _value("closest_guess", _real, "that of the best guess at the same sample"),
    _value(
        "explains", pa.bool_(), "whether an attacker with the defence's code explains what was sent for each sample"
    ),
    _value("verdict", _string, "what all attacks came to on this arm, by the criteria of the audit"),
    _value("inferred_low", _real, "lower end of the 95 % interval of `inferred`, over a run's candidates or victims"),
    _value("attacked", _long, "updates that the attack met"),
    _value("unanswered", _long, "those of them on which it diverged or failed: its figures are no measure of the arm"),
    _value("guessing_accuracy", _real, "most that naming one class gets on 95 % of such test sets, 0..1"),
    _value("train_seconds_half", _real, "half of the 95 % interval of the training time, over the rounds (s)"),
    *(pa.field(name, _real) for name in MEASURES),
]

OUTCOME_COLUMNS = tuple(field.name for field in [*TRIAL_FIELDS, *OUTCOME_FIELDS])
"""All columns of the outcomes but those of swept fields."""

_IMAGE = ("arm", "round", "attack", "victim", "repeat", "sample")


def image_key(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of `attacks`, `images` and `snapshots` that identify an image."""
    return {column: row[column] for column in _IMAGE}
