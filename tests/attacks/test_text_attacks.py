"""Attacks on texts: what they read off is the batch, what stops them, and when they say that they do not apply."""

from __future__ import annotations

from dataclasses import replace

import pytest
import scipy.linalg
import torch
from torch import Tensor, nn

from rayfed.attacks.base import Reconstruction
from rayfed.attacks.text import dager
from rayfed.attacks.text.arranged import arranged
from rayfed.attacks.text.dager import Dager, Span
from rayfed.attacks.text.embedding_rows import EmbeddingRows
from rayfed.attacks.text.grouping import grouped
from rayfed.attacks.text.products import entrances
from rayfed.attacks.text.tag import Tag
from rayfed.attacks.text.tokens import NO_TABLE, tokens_in
from rayfed.defences.gaussian import Gaussian
from rayfed.gradients import gradient, weights_of
from rayfed.models.build import build_model
from rayfed.samples import Tokens
from rayfed.update import LocalTraining, Observation
from tests.helpers.attack_fixtures import generators, observed
from tests.helpers.planted import models as planted
from tests.helpers.text_fixtures import authors, in_place, reader, windows

ATTENTION = ["block1.attention.query", "block1.attention.key", "block1.attention.value"]
REPEATED = torch.tensor([[5, 9, 5, 7, 9, 11, 5, 2, 3, 4, 2, 30, 31, 5, 33, 9]])


def struck(attack: Dager | EmbeddingRows | Tag, model, *observations: Observation) -> list[Reconstruction]:  # type: ignore[no-untyped-def]
    return attack.reconstruct(observations, model, generators(len(observations)))


def seen(model, images: Tensor, labels: Tensor, *defences) -> Observation:  # type: ignore[no-untyped-def]
    return observed(model, images, labels, defences, classes=3)


# ---- dager ----


@pytest.mark.engine
@pytest.mark.parametrize("epochs", [0, 3])
@pytest.mark.parametrize("parameters", [{}, {"width": 32, "heads": 1, "layers": 1}, {"width": 128, "heads": 8}])
def test_dager_reads_a_text_token_by_token(parameters: dict[str, int], epochs: int) -> None:
    model = reader(epochs=epochs, **parameters)
    for seed in range(4):
        images, labels = windows(1, seed)
        [found] = struck(Dager(), model, seen(model, images, labels))
        assert in_place(images, found.images) == 1
        assert torch.equal(found.labels, labels)
        assert found.status == "ok"


@pytest.mark.parametrize("size", [2, 3])
def test_dager_puts_the_texts_of_a_batch_together(size: int) -> None:
    model = reader()
    images, labels = windows(size, seed=1)
    [found] = struck(Dager(starts=16), model, seen(model, images, labels))
    assert in_place(images, found.images) == 1


@pytest.mark.engine
@pytest.mark.parametrize("seed", [1, 2])
def test_dager_puts_texts_together_whose_tokens_lie_in_the_span_at_all_places(seed: int) -> None:
    """Descents from random texts find less than a third of these tokens."""
    model = reader(width=128, heads=8)
    images, labels = windows(5, seed)
    [found] = struck(Dager(starts=8), model, seen(model, images, labels))
    assert in_place(images, found.images) > 0.9


def test_texts_are_told_apart_by_what_their_tokens_have_added() -> None:
    """On vectors and errors by construction: four texts of eight of 29 tokens, of which one stands in all."""
    generator = torch.Generator().manual_seed(0)
    token_parts, place_parts = torch.randn(29, 64, generator=generator), torch.randn(8, 64, generator=generator)
    texts = torch.cat([torch.zeros(4, 1, dtype=torch.long), 1 + torch.arange(28).reshape(4, 7)], 1)
    errors = torch.randn(4, 1, 96, generator=generator) + torch.randn(4, 8, 96, generator=generator)
    vectors = token_parts[:, None] + place_parts
    gradient = torch.einsum("nlx,nly->xy", vectors[texts, torch.arange(8)], errors)
    tokens = torch.arange(29) + 100
    told = grouped(tokens, vectors, torch.ones(29, 8, dtype=torch.bool), gradient, 4)
    assert told is not None
    assert sorted(told.once.tolist()) == tokens[1:].tolist()
    assert {tuple(text.tolist()) for text in told.texts} == {tuple(text.tolist()) for text in texts + 100}
    likely, possible = told.without([told.texts[0]])
    assert [told.texts[0, at] in possible[at] for at in range(8)] == [True] + 7 * [False]
    assert [told.texts[0, at] in likely[at] for at in range(8)] == [True] + 7 * [False]
    assert grouped(tokens, vectors[:, :1].expand_as(vectors), torch.ones(29, 8, dtype=torch.bool), gradient, 4) is None


def test_the_distance_is_that_from_the_span_of_the_true_inputs() -> None:
    """Against scipy's basis of what really entered the attention, not of the gradient."""
    model, (images, labels) = reader(), windows(1)
    observation = seen(model, images, labels)
    entered: list[Tensor] = []
    hook = model.get_submodule(ATTENTION[0]).register_forward_pre_hook(lambda _, inputs: entered.append(inputs[0][0]))
    model(images)
    hook.remove()
    basis = scipy.linalg.orth(entered[0].detach().double().numpy().T)
    assert basis.shape == (64, 16)
    first, *_ = entrances(observation, model)
    assert [factor.name for factor in first.factors] == [f"{layer}.weight" for layer in ATTENTION]
    torch.testing.assert_close(first.inputs(images)[0], entered[0].detach())
    span = Span.of(observation, first)
    vectors = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    outside = vectors.double().numpy() - vectors.double().numpy() @ basis @ basis.T
    expected = torch.from_numpy(scipy.linalg.norm(outside, axis=1)) / vectors.double().norm(dim=1)
    torch.testing.assert_close(span.distance(vectors), expected, rtol=1e-4, atol=1e-6)
    assert span.distance(entered[0]).max() < 1e-4


class Packed(nn.Module):
    """PyTorch's own encoder, places before texts: query, key and value are one parameter."""

    def __init__(self, norm_first: bool = False, batch_first: bool = False) -> None:
        super().__init__()
        self.words, self.at = nn.Embedding(1024, 64), nn.Parameter(torch.randn(16, 64))
        layer = nn.TransformerEncoderLayer(64, 4, 96, 0.0, norm_first=norm_first, batch_first=batch_first)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(64, 3)
        self.swap = not batch_first

    def forward(self, numbers: Tensor) -> Tensor:
        hidden = self.words(numbers) + self.at
        if self.swap:
            return self.head(self.encoder(hidden.transpose(0, 1)).mean(0))
        return self.head(self.encoder(hidden).mean(1))


class Transposed(nn.Module):
    """A layer that keeps its weight as (in, out), as those of GPT-2 do."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.w, self.b = nn.Parameter(0.1 * torch.randn(width, out)), nn.Parameter(torch.zeros(out))

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.addmm(self.b, hidden.reshape(-1, hidden.shape[-1]), self.w).unflatten(0, hidden.shape[:-1])


class Causal(nn.Module):
    """A language model's body, causal, packed and transposed, with a tied head beside that of the classes."""

    def __init__(self, rotary: bool = False) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(1024, 64), None if rotary else nn.Embedding(16, 64)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"a": nn.LayerNorm(64), "b": Transposed(64, 192), "c": Transposed(64, 64),
                           "d": nn.LayerNorm(64), "e": Transposed(64, 96), "f": Transposed(96, 64)})
            for _ in range(2)
        )  # fmt: skip
        self.last, self.classes = nn.LayerNorm(64), nn.Linear(64, 3)

    def forward(self, numbers: Tensor) -> Tensor:
        hidden, length = self.wte(numbers), numbers.shape[1]
        if self.wpe is not None:
            hidden = hidden + self.wpe(torch.arange(length))
        mask = torch.full((length, length), -torch.inf).triu(1)
        for block in self.blocks:
            query, key, value = (
                t.unflatten(2, (4, 16)).transpose(1, 2) for t in block["b"](block["a"](hidden)).split(64, 2)
            )
            if self.wpe is None:
                query, key = rotated(query), rotated(key)
            shares = (query @ key.transpose(-1, -2) / 4 + mask).softmax(-1)
            hidden = hidden + block["c"]((shares @ value).transpose(1, 2).flatten(2))
            hidden = hidden + block["f"](nn.functional.gelu(block["e"](block["d"](hidden))))
        hidden = self.last(hidden)
        spoken = nn.functional.linear(hidden, self.wte.weight).logsumexp(-1).mean(1, keepdim=True)  # tied
        return self.classes(hidden[:, -1]) + 0.01 * spoken * torch.arange(3.0)


def rotated(vectors: Tensor) -> Tensor:
    """Rotary places: pairs of numbers turned by angles that go with the place."""
    one, other = vectors.chunk(2, -1)
    angles = torch.arange(vectors.shape[-2])[:, None] * torch.logspace(0, -2, one.shape[-1])
    return torch.cat([one * angles.cos() - other * angles.sin(), one * angles.sin() + other * angles.cos()], -1)


class Bert(nn.Module):
    """Norm after the embeddings, class by the first place, all weights in one parameter that nothing is named after."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.at, self.norm = nn.Embedding(1024, 64), nn.Embedding(16, 64), nn.LayerNorm(64)
        self.everything = nn.Parameter(0.1 * torch.randn(2, 6, 64, 64))
        self.head = nn.Linear(64, 3)

    def forward(self, numbers: Tensor) -> Tensor:
        hidden = self.norm(self.words(numbers) + self.at(torch.arange(16)))
        for query, key, value, out, up, down in (block.unbind() for block in self.everything):
            shares = ((hidden @ query) @ (hidden @ key).transpose(-1, -2) / 8).softmax(-1)
            hidden = nn.functional.layer_norm(hidden + (shares @ (hidden @ value)) @ out.T, (64,))
            hidden = nn.functional.layer_norm(hidden + nn.functional.gelu(hidden @ up) @ down, (64,))
        return self.head(hidden[:, 0])


MODELS = {
    "packed": Packed,
    "packed, norm first": lambda: Packed(norm_first=True, batch_first=True),
    "causal": Causal,
    "bert": Bert,
}


@pytest.mark.parametrize("name", MODELS)
def test_dager_finds_what_spans_the_inputs_whatever_it_is_called(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    for images, labels in (
        windows(1),
        (torch.tensor([[5, 9, 5, 7, 9, 11, 5, 2, 3, 4, 2, 30, 31, 5, 33, 9]]), windows(1)[1]),
    ):
        [found] = struck(Dager(), model, seen(model, images, labels))
        assert found.status == "ok", found.message
        assert in_place(images, found.images) == 1


@pytest.mark.parametrize("name", MODELS)
def test_dager_puts_texts_together_on_other_models(name: str) -> None:
    torch.manual_seed(0)
    model, (images, labels) = MODELS[name](), windows(2, seed=1)
    [found] = struck(Dager(starts=16), model, seen(model, images, labels))
    assert found.status == "ok", found.message
    assert in_place(images, found.images) == 1


def test_a_last_layer_whose_inputs_fill_their_space_is_not_asked() -> None:
    """Two texts of sixteen tokens have 32 vectors, as many as its hidden layer is wide."""
    torch.manual_seed(0)
    model, (images, labels) = Packed(), windows(2, seed=1)
    layer = nn.TransformerEncoderLayer(64, 4, 32, 0.0)
    model.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    [found] = struck(Dager(starts=16), model, seen(model, images, labels))
    assert in_place(images, found.images) == 1


@pytest.mark.engine
@pytest.mark.parametrize("seed", [0, 1])
def test_dager_puts_texts_of_few_tokens_together(seed: int) -> None:
    """Nothing tells them apart: texts of twelve tokens that are sought from random ones."""
    images = torch.randint(12, (3, 16), generator=torch.Generator().manual_seed(seed))
    model = reader()
    [found] = struck(Dager(starts=16), model, seen(model, images, torch.arange(3)))
    assert in_place(images, found.images) > 0.9


def test_a_text_that_stands_for_others_is_told() -> None:
    model, (images, labels) = reader(), windows(1)
    observation = seen(model, images.repeat(2, 1), labels.repeat(2))
    [found] = struck(Dager(starts=4), model, observation)
    assert in_place(images.repeat(2, 1), found.images) == 1
    assert found.message == dager._REPEATED


@pytest.mark.engine
@pytest.mark.parametrize("numbers", [REPEATED, torch.tensor([[5, 9] * 8])], ids=["repeated", "alternating"])
@pytest.mark.parametrize("seed", range(4))
def test_tokens_whose_vectors_have_no_place_are_put_in_order_further_on(seed: int, numbers: Tensor) -> None:
    """A text of one token repeated is in the span as well, and others that differ in repeated ones are near."""
    torch.manual_seed(seed)
    model = Causal(rotary=True)
    [found] = struck(Dager(), model, seen(model, numbers, torch.tensor([1])))
    assert found.status == "ok", found.message
    assert in_place(numbers, found.images) == 1


@pytest.mark.engine
def test_dager_falls_with_noise() -> None:
    model = reader()
    rates = []
    for sigma in (1e-5, 1e-3, 1e-1):
        found = [
            in_place(images, struck(Dager(), model, seen(model, images, labels, Gaussian(sigma=sigma)))[0].images)
            for images, labels in (windows(1, seed) for seed in range(4))
        ]
        rates.append(sum(found) / 4)
    assert rates[0] == 1
    assert 0.05 < rates[1] < 0.95
    assert rates[2] < 0.1


def test_dager_reads_an_update_of_one_step_but_not_of_several() -> None:
    model, (images, labels) = reader(), windows(1)
    weights = weights_of(model)
    slope, _ = gradient(model, weights, {}, images, labels)
    sent = {name: w - (w - 0.1 * slope[name]) for name, w in weights.items()}
    one = replace(seen(model, images, labels), update=sent, scale=0.1, local=LocalTraining(1, 1, 0.1))
    [found] = struck(Dager(), model, one)
    assert in_place(images, found.images) == 1
    [found] = struck(Dager(), model, replace(one, local=LocalTraining(2, 1, 0.1)))
    assert (found.status, "several local steps" in found.message) == ("not applicable", True)


def test_dager_reads_as_many_tokens_as_the_span_has_room_for() -> None:
    """A norm without shift takes one of the 32 dimensions away."""
    for length, status in ((24, "ok"), (31, "not applicable")):
        numbers = torch.randint(64, (1, length), generator=torch.Generator().manual_seed(length))
        model = build_model("text_transformer", {"width": 32}, Tokens(tuple(map(str, range(1024))), length), 3, seed=0)
        [found] = struck(Dager(), model, seen(model, numbers, torch.tensor([1])))
        assert found.status == status
        assert status != "ok" or torch.equal(found.images, numbers)


@pytest.mark.parametrize(("name", "size"), [("Flat", 1), ("Flat", 2), ("Tables", 1)])
def test_dager_reads_whole_texts_off_a_layer_that_sees_each_as_one_vector(name: str, size: int) -> None:
    images = torch.randint(60, (size, 6), generator=torch.Generator().manual_seed(size))
    torch.manual_seed(0)
    model = getattr(planted, name)((6,), 3, vocabulary=60)
    observation = seen(model, images, torch.arange(size))
    [found] = struck(Dager(), model, replace(observation, sample=Tokens(tuple(map(str, range(60))), 6)))
    assert in_place(images, found.images) == 1


def test_dager_says_where_it_does_not_apply() -> None:
    images, labels = windows(2)
    full = reader(width=32, layers=1)
    [found] = struck(Dager(), full, seen(full, images, labels))
    assert found.status == "not applicable"
    assert found.message == dager._FULL.format(tokens=32, room=31)
    recurrent = reader("text_rnn")
    observation = seen(recurrent, images[:1], labels[:1])
    assert struck(Dager(), recurrent, observation)[0].message == dager._NO_ORDER
    only = replace(observation, update={name: t for name, t in observation.update.items() if "fc" in name})
    assert struck(Dager(), recurrent, only)[0].message == dager._NO_PRODUCT


# ---- embedding rows ----


@pytest.mark.parametrize("name", ["text_transformer", "text_rnn"])
def test_the_rows_that_move_are_the_batchs_tokens(name: str) -> None:
    model = reader(name)
    for seed in range(3):
        images, labels = windows(2, seed)
        found = tokens_in(seen(model, images, labels).gradient["embed.table.weight"], 32)
        assert set(found.tolist()) == set(images.flatten().tolist())


def test_under_noise_the_rows_that_stand_out_are() -> None:
    model, (images, labels) = reader(), windows(1)
    found = tokens_in(seen(model, images, labels, Gaussian(sigma=1e-3)).gradient["embed.table.weight"], 16)
    true = set(images.flatten().tolist())
    assert set(found.tolist()) <= true
    assert len(set(found.tolist()) & true) >= 0.8 * len(true)


def test_a_bag_has_every_token_and_as_many_as_the_batch() -> None:
    model = reader("text_rnn")
    images, labels = windows(2)
    [found] = struck(EmbeddingRows(), model, seen(model, images, labels))
    true, guess = images.flatten().tolist(), found.images.flatten().tolist()
    assert len(guess) == 32
    assert set(guess) == set(true)


def test_weights_with_the_shape_of_places_are_not_taken_for_them() -> None:
    """As many classes as places, as many units as a vector has numbers."""
    model, (images, labels) = build_model("text_rnn", {}, authors().sample, 16, seed=0), windows(1)
    [found] = struck(EmbeddingRows(), model, observed(model, images, labels, (), classes=16))
    assert set(found.images.flatten().tolist()) == set(images.flatten().tolist())


@pytest.mark.parametrize("kind", ["RNN", "LSTM", "GRU"])
@pytest.mark.parametrize("noisy", [False, pytest.param(True, marks=pytest.mark.engine)])
def test_the_order_of_a_text_is_the_one_that_has_its_gradient(kind: str, noisy: bool) -> None:
    for seed in range(1 if noisy else 2):
        torch.manual_seed(seed)
        model = planted.Read((8,), 3, vocabulary=1024, kind=kind)
        text = torch.randint(20, (1, 8), generator=torch.Generator().manual_seed(seed))
        observation = seen(model, text, torch.tensor([1]))
        if noisy:
            rest = {n: t + 0.1 * torch.randn(t.shape) for n, t in observation.update.items() if "table" not in n}
            observation = replace(observation, update=observation.update | rest)
        [found] = struck(EmbeddingRows(), model, observation)
        assert torch.equal(found.images, text)


def test_no_order_is_sought_under_labels_that_nobody_could_read(monkeypatch: pytest.MonkeyPatch) -> None:
    model, text = planted.Read((8,), 3), torch.arange(8)[None]
    observation = replace(seen(model, text, torch.tensor([1])), labels=torch.full((1, 3), torch.nan))
    monkeypatch.setattr("rayfed.gradients.gradient", None)
    assert torch.equal(arranged(observation, model, "table.weight", text[0].flip(0)), text[0].flip(0))


def test_a_table_of_bags_of_tokens_is_read_as_one() -> None:
    class Bag(nn.Module):
        """The mean of the tokens' vectors."""

        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.EmbeddingBag(1024, 16), nn.Linear(16, 3)

        def forward(self, texts: Tensor) -> Tensor:
            logits: Tensor = self.head(self.table(texts))
            return logits

    torch.manual_seed(0)
    model, text = Bag(), torch.tensor([[5, 9, 5, 7, 9, 11, 5, 2]])
    [found] = struck(EmbeddingRows(), model, seen(model, text, torch.tensor([1])))
    assert found.images.flatten().sort().values.tolist() == text.flatten().sort().values.tolist()


def test_a_model_too_large_for_a_look_at_all_places_keeps_the_bag() -> None:
    model, text = planted.Read((8,), 3, vocabulary=2_000_000), torch.arange(8)[None]
    observation = replace(seen(model, text, torch.tensor([1])), labels=torch.tensor([1]))
    assert torch.equal(arranged(observation, model, "table.weight", text[0].flip(0)), text[0].flip(0))


def test_learnt_places_give_the_order_away_even_of_repeated_tokens() -> None:
    model = reader()
    [found] = struck(EmbeddingRows(), model, seen(model, REPEATED, torch.tensor([1])))
    assert torch.equal(found.images, REPEATED)


def test_places_learnt_for_longer_texts_give_the_order_away() -> None:
    class Long(nn.Module):
        """Vectors of places 2 to 17 of forty, as RoBERTa takes them, and a norm behind the sum."""

        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.places = nn.Embedding(1024, 32), nn.Embedding(40, 32)
            self.norm, self.fc = nn.LayerNorm(32), nn.Linear(32, 3)

        def forward(self, numbers: Tensor) -> Tensor:
            hidden = self.norm(self.tokens(numbers) + self.places(torch.arange(2, 2 + numbers.shape[1])))
            logits: Tensor = self.fc(torch.tanh(hidden).mean(1))
            return logits

    torch.manual_seed(5)
    images, labels = windows(1, seed=31)
    model = Long()
    [found] = struck(EmbeddingRows(), model, seen(model, images, labels))
    assert torch.equal(found.images, images)


@pytest.mark.parametrize("name", ["Tables", "Added"])
def test_a_table_for_each_place_gives_order_and_tokens_away(name: str) -> None:
    texts = torch.randint(60, (1, 6), generator=torch.Generator().manual_seed(3))
    torch.manual_seed(0)
    model = getattr(planted, name)((6,), 3, vocabulary=60)
    observation = seen(model, texts, torch.ones(1, dtype=torch.int64))
    [found] = struck(EmbeddingRows(), model, replace(observation, sample=Tokens(tuple(map(str, range(60))), 6)))
    assert torch.equal(found.images, texts)


def test_without_a_table_there_is_nothing_to_read() -> None:
    model, (images, labels) = reader(), windows(1)
    observation = seen(model, images, labels)
    update = {name: t for name, t in observation.update.items() if name != "embed.table.weight"}
    [found] = struck(EmbeddingRows(), model, replace(observation, update=update))
    assert found.message == NO_TABLE


@pytest.mark.parametrize("attack", [Dager(), EmbeddingRows()])
def test_an_update_that_is_not_finite_is_told(attack: Dager | EmbeddingRows) -> None:
    model, (images, labels) = reader(), windows(1)
    observation = seen(model, images, labels)
    spoilt = {name: torch.full_like(t, torch.nan) for name, t in observation.update.items()}
    [found] = struck(attack, model, replace(observation, update=spoilt))
    assert found.status == "failed"


# ---- tag ----


@pytest.mark.slow
def test_tag_finds_most_tokens_of_a_small_model() -> None:
    """In the mean of six texts: of a single one it may find a third, or all but three tokens."""
    model, shares = reader(), []
    for images, labels in (windows(1, seed) for seed in range(6)):
        [found] = struck(Tag(iterations=300), model, seen(model, images, labels))
        shares.append(in_place(images, found.images))
        assert set(found.images.flatten().tolist()) <= set(images.flatten().tolist())
        assert found.trace[-1][1] < found.trace[0][1]
    assert sum(shares) / len(shares) >= 0.5


def test_tag_gives_each_observation_what_it_gets_alone() -> None:
    model = reader(width=16, heads=2, layers=1)
    observations = [seen(model, *windows(1, seed)) for seed in range(2)]
    together = Tag(iterations=20).reconstruct(observations, model, generators(2))
    alone = Tag(iterations=20).reconstruct(observations[1:], model, generators(2)[1:])
    assert torch.equal(together[1].images, alone[0].images)


def test_tag_reads_recurrent_models_and_updates_without_a_table() -> None:
    model, (images, labels) = reader("text_rnn", width=16, hidden=16), windows(1)
    observation = seen(model, images, labels)
    weights = dict(observation.weights)
    frozen = {"embed.table.weight": weights.pop("embed.table.weight")}
    update = {name: t for name, t in observation.update.items() if name in weights}
    [found] = struck(Tag(iterations=10), model, replace(observation, weights=weights, buffers=frozen, update=update))
    assert found.status == "ok"
    assert found.images.shape == images.shape
