"""Evaluation of new weights by client workers, on slices of the data, or per client for private layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from math import exp, isnan, sqrt
from operator import add
from typing import Any

import numpy as np
import torch

from rayfed.core.losses import Loss
from rayfed.core.objective import NO_TARGET
from rayfed.data.base import Dataset
from rayfed.errors import DataError
from rayfed.simulation.client.runtime import Evaluation
from rayfed.simulation.client.server_message import Split, State
from rayfed.simulation.executors.base import Call, Ref, Run

_ONE_SIDED = 1.645
"""95 % quantile of the standard normal distribution."""
EVALUATION_SLICE = 1000
"""Samples per call. It is fixed, so that the sum of losses does not depend on the cluster."""

Found = dict[str, float | None]
"""Columns of the table `rounds`, by name."""


def count_slices(samples: int) -> int:
    """Return the number of worker calls needed to evaluate `samples` samples."""
    return -(-samples // EVALUATION_SLICE)


def evaluate(run: Run, sent: Mapping[str, Ref], sizes: Mapping[Split, int]) -> dict[str, Found]:
    """Evaluate each arm's weights, and return loss, accuracy and error by arm; `sizes` has the samples per split."""
    calls = [
        Call("evaluate", (arm, ref, start, min(start + EVALUATION_SLICE, size), split), (arm, split, start))
        for arm, ref in sent.items()
        for split, size in sizes.items()
        for start in range(0, size, EVALUATION_SLICE)
    ]
    found = {call.tag: result for call, result, *_ in run(calls)}

    def mean(arm: str, split: Split, which: int) -> float | None:
        size = sizes.get(split)
        starts = range(0, size or 0, EVALUATION_SLICE)
        return sum(found[arm, split, start][which] for start in starts) / size if size else None

    def whole(arm: str) -> Evaluation:
        parts: list[Evaluation] = [found[arm, "test", start] for start in range(0, sizes["test"], EVALUATION_SLICE)]
        return reduce(add, parts)

    return {
        arm: {
            "test_loss": mean(arm, "test", 0),
            "test_accuracy": finite_or_none(mean(arm, "test", 1)),
            "train_accuracy": finite_or_none(mean(arm, "train", 1)),
            "test_error": finite_or_none(mean(arm, "test", 2)),
            "test_perplexity": finite_or_none(whole(arm).perplexity),
            "test_iou": finite_or_none(whole(arm).iou),
        }
        for arm in sent
    }


def finite_or_none(value: float | None) -> float | None:
    """Return a metric's value, or None if the value is NaN because the loss does not define the metric."""
    return None if value is None or isnan(value) else value


def measure_baselines(data: Dataset, loss: Loss) -> Found:
    """Return the baselines of constant predictions: accuracy of the majority class, or error of the median.

    The accuracy is a one-sided 95 % confidence bound for test sets of this size. Binary labels are counted separately,
    and so are labels of places. Tokens also have the perplexity of their frequencies, and masks the intersection over
    union of a constant mask. Values are None for words, and if the loss does not define them.
    """
    if data.has_words:
        return {"baseline_accuracy": None, "baseline_error": None, "baseline_perplexity": None, "baseline_iou": None}
    if data.has_places:
        return _guesses_of_places(data, loss)
    count, labels = len(data.test_labels), torch.from_numpy(data.test_labels)
    outputs = labels if data.has_numbers else torch.zeros(count, len(data.classes))
    accuracy = error = None
    if loss.right(outputs, labels) is not None:
        of_each = data.test_labels.astype(np.int64).reshape(count, -1).T
        share = float(np.mean([np.bincount(column).max() for column in of_each])) / count
        accuracy = min(1.0, share + _ONE_SIDED * sqrt(share * (1 - share) / count))
    if loss.error(outputs, labels) is not None:
        error = float(np.abs(data.test_labels - np.median(data.test_labels, axis=0)).mean())
    return {"baseline_accuracy": accuracy, "baseline_error": error, "baseline_perplexity": None, "baseline_iou": None}


def _guesses_of_places(data: Dataset, loss: Loss) -> Found:
    """Return the performance of predicting classes of places by their frequencies in the test split."""
    counts = np.bincount(data.test_labels[data.test_labels != NO_TARGET], minlength=1)
    if not counts.any():
        raise DataError(
            "no position (token or pixel) of the test samples has a class label, so the model cannot be evaluated"
        )
    shares = counts[counts > 0] / counts.sum()
    share = float(shares.max())
    accuracy = min(1.0, share + _ONE_SIDED * sqrt(share * (1 - share) / len(data.test_labels)))
    of_tokens = loss.takes == "tokens"
    perplexity = exp(-float((shares * np.log(shares)).sum())) if of_tokens else None
    masks = data.sample.modality == "pixels"
    return {
        "baseline_accuracy": accuracy,
        "baseline_error": None,
        "baseline_perplexity": perplexity,
        "baseline_iou": share / len(shares) if masks else None,
    }


def evaluate_backdoors(run: Run, sent: Mapping[str, Ref], size: int) -> dict[str, Found]:
    """Return the success rate of backdoor triggers by arm, on the test samples that do not have the target class."""
    calls = [
        Call("evaluate_backdoor", (arm, ref, start, min(start + EVALUATION_SLICE, size)), arm)
        for arm, ref in sent.items()
        for start in range(0, size, EVALUATION_SLICE)
    ]
    counts: dict[str, list[tuple[int, int]]] = {arm: [] for arm in sent}
    for call, count, *_ in run(calls):
        counts[call.tag].append(count)
    shares = {arm: [sum(column) for column in zip(*found, strict=True)] for arm, found in counts.items()}
    return {arm: {"backdoor_accuracy": taken / tried if tried else None} for arm, (taken, tried) in shares.items()}


def evaluate_encrypted(run: Run, sent: Mapping[str, Ref], images: int) -> dict[str, Found]:
    """Classify the first test images under encryption, and return the columns `encrypted_*` of `rounds` by arm."""
    calls = [Call("classify_encrypted", (arm, ref, images), arm) for arm, ref in sent.items()]
    return {call.tag: found for call, found, *_ in run(calls)}


def measure_private_layers(run: Run, states: Mapping[str, Mapping[int, State]]) -> list[dict[str, Any]]:
    """Measure the clients' private layers, and return the rows of the table `private` without the column `round`."""
    calls = [Call("private_layers", (arm, list(members.values())), arm) for arm, members in states.items() if members]
    found = {call.tag: rows for call, rows, *_ in run(calls)}
    return [{"arm": arm, **row} for arm in states for row in found.get(arm, [])]


def evaluate_members(
    run: Run,
    sent: Mapping[str, Ref],
    states: Mapping[str, Mapping[int, State]],
    samples: np.ndarray,
    splits: Sequence[Split],
) -> tuple[dict[str, Found], dict[tuple[str, int], float | None]]:
    """Evaluate member clients with their private parts of the model, and a non-member without a private part.

    Returns the mean over the clients in `states` and the results of a non-member, by arm, and every client's test
    accuracy, by (arm, client). `samples[c]` is the number of samples of client c.
    """
    asked = {arm: states[arm] for arm in sent if states[arm]}
    calls = [
        Call("evaluate_member", (arm, sent[arm], client, state, splits), (arm, client))
        for arm, own in asked.items()
        for client, state in own.items()
    ]
    calls += [Call("evaluate_non_member", (arm, sent[arm], [*own.values()]), (arm, None)) for arm, own in asked.items()]
    found = {call.tag: result for call, result, *_ in run(calls)}

    def mean(arm: str, split: Split, which: int) -> float | None:
        if split not in splits:
            return None
        weights = {c: int(samples[c]) if split == "train" else 1 for c in states[arm]}
        total: float = sum(w * found[arm, c][split][which] for c, w in weights.items())
        return total / sum(weights.values())

    def whole(arm: str) -> Evaluation:
        """Return the evaluation of all clients' tokens or pixels together."""
        each: list[Evaluation] = [found[arm, c]["test"] for c in states[arm]]
        return reduce(add, each)

    means: dict[str, Found] = {
        arm: {
            "test_loss": mean(arm, "test", 0),
            "test_accuracy": finite_or_none(mean(arm, "test", 1)),
            "train_accuracy": finite_or_none(mean(arm, "train", 1)),
            "test_error": finite_or_none(mean(arm, "test", 2)),
            "test_perplexity": finite_or_none(whole(arm).perplexity),
            "test_iou": finite_or_none(whole(arm).iou),
            "non_member_accuracy": finite_or_none(found[arm, None][0]),
            "non_member_mean_accuracy": finite_or_none(found[arm, None][1]),
            "non_member_zero_accuracy": finite_or_none(found[arm, None][2]),
        }
        for arm in asked
    }
    return means, {(arm, c): finite_or_none(found[arm, c]["test"][1]) for arm in asked for c in states[arm]}
