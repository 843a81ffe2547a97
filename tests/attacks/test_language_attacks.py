"""Attacks on language models: what entered, read off tied tables and causal attention, and what has no answer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from rayfed.attacks.adaptive.two_images import TwoImages
from rayfed.attacks.base import Reconstruction
from rayfed.attacks.sealed import _NOT_GIVEN, attempt
from rayfed.attacks.text.dager import Dager
from rayfed.attacks.text.embedding_rows import EmbeddingRows
from rayfed.attacks.text.tag import Tag
from rayfed.core import losses
from rayfed.core.losses import PlaceCrossEntropy
from rayfed.gradients import buffers_of, gradient, weights_of
from rayfed.metrics.score import Scorer
from rayfed.update import Observation
from tests.helpers.attack_fixtures import generators
from tests.helpers.language_fixtures import PAD, SAMPLE, language_model, model, observed, texts
from tests.helpers.text_fixtures import in_place


def struck(attack: Dager | EmbeddingRows | Tag, built: nn.Module, seen: Observation) -> Reconstruction:
    [found] = attack.reconstruct([seen], built, generators(1))
    assert found.status == "ok"
    return found


@pytest.mark.engine
@pytest.mark.parametrize("attack", [Dager(), EmbeddingRows()])
@pytest.mark.parametrize("short", [False, True])
def test_a_text_is_read_whole_off_a_causal_model_with_tied_embeddings(
    attack: Dager | EmbeddingRows, short: bool
) -> None:
    built = language_model("gpt2")
    for row in range(2):
        inputs, targets = (t[row + 1 : row + 2] for t in texts(3, seed=row, short=short))
        found = struck(attack, built, observed(built, inputs, targets))
        assert torch.equal(found.images, inputs)


def test_a_text_that_ends_with_a_token_that_it_has_is_read_too() -> None:
    built = language_model("gpt2")
    inputs = torch.tensor([[30, 41, 52, 63, 74, 85, 96, 52]])
    assert torch.equal(struck(Dager(), built, observed(built, inputs, inputs)).images, inputs)


@pytest.mark.engine
@pytest.mark.parametrize("size", [2, 3])
def test_several_texts_are_read_off_one_gradient(size: int) -> None:
    built = language_model("gpt2")
    inputs, targets = texts(size, seed=size)
    assert in_place(inputs, struck(Dager(), built, observed(built, inputs, targets)).images) == 1
    bag = struck(EmbeddingRows(), built, observed(built, inputs, targets)).images
    assert set(inputs.flatten().tolist()) <= set(bag.flatten().tolist())


def masked(built: nn.Module, seed: int) -> tuple[Tensor, Tensor]:
    return losses.get_loss(built).presented(*texts(1, seed), SAMPLE, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("attack", [Dager(), EmbeddingRows()])
def test_what_a_masked_model_was_shown_is_read_masks_among_it(attack: Dager | EmbeddingRows) -> None:
    built = language_model("bert")
    for seed in range(2):
        inputs, targets = masked(built, seed)
        assert torch.equal(struck(attack, built, observed(built, inputs, targets)).images, inputs)


def test_the_last_token_stays_unknown_where_outputs_are_not_learnt() -> None:
    built = language_model("gpt2")
    inputs, targets = texts(1)
    found = struck(Dager(), built, observed(built, inputs, targets, ["transformer.h.0.*"])).images
    assert torch.equal(found[:, :-1], inputs[:, :-1])


def test_attacks_that_need_labels_have_no_answer_for_a_language_model() -> None:
    built = language_model("gpt2")
    seen = observed(built, *texts(1))
    [found] = attempt(Tag(iterations=2), [seen], built, generators(1), factor=False)
    assert found.status == "not applicable"
    assert _NOT_GIVEN in found.message
    [other] = attempt(TwoImages(), [seen], built, generators(1), factor=False)
    assert other.status == "not applicable"


def test_labels_of_tokens_that_are_given_let_tag_search() -> None:
    built = model("bert", PlaceCrossEntropy(), classes=3, task="token_classification")
    inputs, _ = texts(1)
    targets = torch.randint(3, inputs.shape, generator=torch.Generator().manual_seed(0))
    weights, buffers = weights_of(built), buffers_of(built)
    update, _ = gradient(built, weights, buffers, inputs, targets)
    seen = replace(observed(built, inputs, targets), weights=weights, buffers=buffers, update=update, classes=3)
    [nothing] = attempt(Tag(iterations=2), [seen], built, generators(1), factor=False)
    assert nothing.status == "not applicable"
    [found] = attempt(Tag(iterations=3), [replace(seen, labels=targets)], built, generators(1), factor=False)
    assert isinstance(found, Reconstruction)
    assert found.status == "ok"
    assert found.images.shape == inputs.shape


def test_labels_of_places_are_no_classes_to_score() -> None:
    inputs, targets = texts(2, short=True)
    scorer = Scorer(("token_accuracy", "label_accuracy"), sample=SAMPLE)
    rows = scorer.score(inputs, targets, inputs, torch.full((2,), losses.NO_TARGET))
    assert [row["token_accuracy"] for row in rows] == [1, 1]
    assert all(row["label_accuracy"] is row["true_label"] is row["label"] is None for row in rows)
    assert all(row["true_label"] is None for row in scorer.nothing(targets))
    assert PAD in inputs
