"""What the gradients of low-rank adapters give away of a text: at the first step, later, and where the rank ends it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from benchmarks.lora import named
from rayfed.attacks.base import Reconstruction
from rayfed.attacks.text import dager
from rayfed.attacks.text.dager import Dager
from rayfed.attacks.text.pursuit import pursued
from rayfed.defences.gaussian import Gaussian
from rayfed.models.hugging_face import HuggingFace
from rayfed.models.lora import add_lora
from rayfed.models.prompt import add_prompt
from rayfed.models.trained import choose
from rayfed.samples import Tokens
from tests.conftest import imported
from tests.helpers.attack_fixtures import generators, observed

transformers = imported("transformers", "hub")
imported("peft", "hub")

LENGTH = 16
WORDS = Tokens(tuple(f" w{n}" for n in range(400)), LENGTH)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small BERT of random weights."""
    torch.manual_seed(0)
    found = tmp_path_factory.mktemp("bert")
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
    config = transformers.BertConfig(vocab_size=400, max_position_embeddings=LENGTH, num_labels=3, **sizes)
    config.initializer_range = 0.3
    transformers.AutoModelForSequenceClassification.from_config(config).save_pretrained(found)
    return found


def adapted(folder: Path, rank: int, moved: bool = False) -> nn.Module:
    """The model with adapters beside query and value, at the first step or after B has moved."""
    torch.manual_seed(1)
    model = HuggingFace(path=folder, dropout=0.0).build((LENGTH,), 3)
    choose(model, ["head"], [lambda m: add_lora(m, rank, 2.0 * rank, None, 0.0)])
    for name, parameter in model.named_parameters():
        if moved and "lora_B" in name:
            nn.init.normal_(parameter, std=0.02)
    return model


def texts(count: int, seed: int = 0, tokens: int = LENGTH) -> Tensor:
    """Texts of so many different tokens; the rest is padding."""
    drawn = torch.randint(1, 400, (count, LENGTH), generator=torch.Generator().manual_seed(seed))
    drawn[:, tokens:] = 0
    return drawn


def struck(model: nn.Module, numbers: Tensor, *defences: Gaussian) -> Reconstruction:
    seen = observed(model, numbers, torch.arange(len(numbers)) % 3, defences, classes=3)
    [found] = Dager().reconstruct([replace(seen, sample=WORDS)], model, generators(1))
    return found


@pytest.mark.engine
def test_at_the_first_step_a_rank_above_the_tokens_gives_the_text_away(folder: Path) -> None:
    for seed in range(3):
        numbers = texts(1, seed)
        found = struck(adapted(folder, 24), numbers)
        assert found.status == "ok", found.message
        assert torch.equal(found.images, numbers)


@pytest.mark.parametrize("defences", [(), (Gaussian(sigma=1e-6),)])
def test_at_the_first_step_a_rank_below_the_tokens_is_said_and_not_guessed(
    folder: Path, defences: tuple[Gaussian, ...]
) -> None:
    """Noise on the gradient of A, which is zero without it, is no span of anything."""
    found = struck(adapted(folder, 8), texts(1), *defences)
    assert found.status == "not applicable"
    name = next(word for word in found.message.split() if "lora_A" in word)
    assert found.message == dager._UNMOVED.format(name=name, room=8, tokens=16)


def test_a_prompt_is_said_and_not_guessed(folder: Path) -> None:
    short = LENGTH - 4
    model = HuggingFace(path=folder, dropout=0.0).build((short,), 3)
    choose(model, ["*"], [lambda m: add_prompt(m, 4, (short,))])
    seen = observed(model, texts(1)[:, :short], torch.zeros(1, dtype=torch.int64), (), classes=3)
    [found] = Dager().reconstruct([replace(seen, sample=replace(WORDS, length=short))], model, generators(1))
    assert found.status == "not applicable"
    assert found.message == dager._PROMPTED


def test_a_text_shorter_than_the_rank_is_read_at_the_first_step(folder: Path) -> None:
    """What fills it up moves nothing."""
    numbers = texts(1, tokens=5)
    found = struck(adapted(folder, 8), numbers)
    assert found.status == "ok", found.message
    assert torch.equal(found.images[:, :5], numbers[:, :5])


@pytest.mark.engine
@pytest.mark.parametrize("rank", [8, 16])
def test_later_steps_give_the_text_away_at_a_rank_below_its_tokens(folder: Path, rank: int) -> None:
    """Two adapters of the same inputs have 16 and 32 sums of 16 vectors."""
    for seed in range(2):
        numbers = texts(1, seed)
        found = struck(adapted(folder, rank, moved=True), numbers)
        assert (found.status, found.message) == ("ok", "")
        assert torch.equal(found.images, numbers)


def test_fewer_sums_than_tokens_give_the_text_away_too(folder: Path) -> None:
    """Twelve sums of 16 vectors."""
    numbers = texts(1)
    found = struck(adapted(folder, 6, moved=True), numbers)
    assert (found.status, found.message) == ("ok", "")
    assert torch.equal(found.images, numbers)


@pytest.mark.engine
def test_what_a_pursuit_cannot_do_is_said(folder: Path) -> None:
    few = struck(adapted(folder, 1, moved=True), texts(1))
    assert (few.status, few.message) == ("ok", dager._UNFINISHED)
    batch = struck(adapted(folder, 4, moved=True), texts(2))
    assert batch.status == "not applicable"
    name = next(word for word in batch.message.split() if "lora_A" in word)
    assert batch.message == dager._FEW_SUMS.format(name=name, rank=8, tokens=32, why=dager._OF_SEVERAL)


def test_no_pursuit_is_made_on_all_layers_whose_dropout_hides_their_vectors(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gradient of short texts has a low rank too, and no vector of the attacker's lies in its span."""
    model, numbers = HuggingFace(path=folder, dropout=0.5).build((LENGTH,), 3).train(), texts(1, tokens=5)
    monkeypatch.setattr("rayfed.attacks.text.dager.pursued", None)
    found = struck(model, numbers)
    assert (found.status, found.message) == ("ok", "")
    assert not torch.equal(found.images[:, :5], numbers[:, :5])


@pytest.mark.engine
@pytest.mark.parametrize(("sigma", "least", "most"), [(0.0, LENGTH, LENGTH), (1e-3, LENGTH - 2, LENGTH), (1e3, 0, 6)])
def test_an_update_behind_which_no_attack_reads_still_tells_a_token_from_others(
    folder: Path, sigma: float, least: int, most: int
) -> None:
    """At a rank too small for `dager`; noise that drowns the gradient leaves the one in eight of chance."""
    model, numbers, label = adapted(folder, 8), texts(1), torch.tensor([0])
    seen = replace(observed(model, numbers, label, (Gaussian(sigma=sigma),), classes=3), sample=WORDS)
    assert least <= named(seen, model, numbers, label, 7) <= most


def test_of_a_head_alone_nothing_multiplies_a_token(folder: Path) -> None:
    model = HuggingFace(path=folder, dropout=0.0).build((LENGTH,), 3)
    choose(model, ["head"])
    found = struck(model, texts(1))
    assert found.status == "not applicable"
    assert found.message == dager._NO_PRODUCT


def test_the_gradients_of_an_adapter_span_what_the_mathematics_says(folder: Path) -> None:
    """Against the factors of the layer itself: dB is s G^T (A x)^T, and dA is s B^T G^T x^T."""
    model, numbers = adapted(folder, 8, moved=True), texts(1)
    layer = model.get_submodule("bert.encoder.layer.0.attention.self.value")
    entered: list[Tensor] = []
    left: list[Tensor] = []

    def keep(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        entered.append(inputs[0][0].detach())
        output.register_hook(lambda slope: left.append(slope[0]))

    hook = layer.register_forward_hook(keep)
    seen = observed(model, numbers, torch.tensor([0]), (), classes=3)
    nn.functional.cross_entropy(model(numbers), torch.tensor([0])).backward()
    hook.remove()
    x, g = entered[-1], left[-1]
    name = "bert.encoder.layer.0.attention.self.value.lora_{}.default.weight"
    a, b = seen.weights[name.format("A")], seen.weights[name.format("B")]
    torch.testing.assert_close(seen.update[name.format("B")], 2.0 * g.T @ (x @ a.T), rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(seen.update[name.format("A")], 2.0 * b.T @ g.T @ x, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(("rank", "tokens"), [(12, 12), (6, 12), (3, 12)])
def test_a_pursuit_finds_the_vectors_that_rows_are_sums_of(rank: int, tokens: int) -> None:
    generator = torch.Generator().manual_seed(rank)
    vectors = torch.randn(tokens, 200, 64, generator=generator)
    text = torch.randint(200, (tokens,), generator=generator)
    sums = torch.randn(rank, tokens, generator=generator) @ vectors[torch.arange(tokens), text]
    found = pursued(sums, vectors)
    assert torch.equal(found.tokens, text)
    assert found.complete
    other = pursued(torch.randn(rank, 64, generator=generator), vectors)
    assert not other.complete


def test_a_text_whose_last_tokens_weigh_little_is_found_too() -> None:
    """Of similar vectors, and tokens of which some weigh 30 times less than others: less is left with each reading."""
    for seed in (14, 16, 17):
        generator = torch.Generator().manual_seed(seed)
        scale = torch.logspace(0, -0.5, 48)
        vectors = torch.randn(400, 48, generator=generator) * scale
        vectors = vectors + 0.3 * torch.randn(20, 1, 48, generator=generator) * scale
        vectors = vectors / vectors.norm(dim=-1, keepdim=True)
        text = torch.randint(400, (20,), generator=generator)
        weights = torch.randn(8, 20, generator=generator) * 10 ** (-1.5 * torch.rand(20, generator=generator))
        sums = weights @ vectors[torch.arange(20), text]
        found = pursued(sums.double().svd().V.T[:8], vectors)
        assert torch.equal(found.tokens, text)
        assert found.complete
        other = pursued(torch.randn(8, 48, generator=generator), vectors)
        assert not other.complete


def test_a_text_is_not_complete_because_rows_and_its_tokens_fill_the_space() -> None:
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(16, 400, 24, generator=generator)
    assert not pursued(torch.randn(10, 24, generator=generator), vectors).complete


def test_a_pursuit_finds_a_text_beyond_the_bound_that_holds_for_all_sums() -> None:
    """Of 7 vectors in 8 dimensions 4 sums are sums of no others (2 * 7 >= 8 + 4), but where these are chosen so."""
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        vectors, text = torch.randn(7, 3, 8, generator=generator), torch.randint(3, (7,), generator=generator)
        found = pursued(torch.randn(4, 7, generator=generator) @ vectors[torch.arange(7), text], vectors)
        assert torch.equal(found.tokens, text)
        assert found.complete
