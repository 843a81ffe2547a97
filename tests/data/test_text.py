"""Texts as data and the models that read them: windows of tokens, gradients in all the forms that are needed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from rayfed.defences.dp_sgd import DpSgd
from rayfed.defences.gaussian import Gaussian
from rayfed.defences.prune import Prune
from rayfed.defences.quantise import Quantise
from rayfed.errors import DataError, UserError
from rayfed.gradients import gradient, many_gradients, per_sample_gradients, weights_of
from rayfed.metrics.assignment import assign
from rayfed.metrics.score import Scorer
from rayfed.models.build import build_model
from rayfed.registry import build
from rayfed.runs import runner
from rayfed.samples import Column, Pixels, Records, SampleSpec, Tokens
from rayfed.scenario import parse
from rayfed.simulation.executors.local import local
from rayfed.simulation.inputs import prepare_inputs
from rayfed.simulation.progress import Progress
from tests.helpers.attack_fixtures import observed
from tests.helpers.text_fixtures import authors, reader, windows

MODELS = ["text_transformer", "text_rnn"]
SCENARIO = "{name: t, data: text, model: text_transformer, federation: {rounds: 1, clients: 2}, %s}"


# ---- data ----


def test_a_window_reads_as_the_text_that_it_is_cut_from() -> None:
    data = authors()
    assert data.sample.shape == (16,)
    assert data.classes == ("carroll", "milton", "shakespeare")
    assert isinstance(data.sample, Tokens)
    first = "".join(data.sample.read(torch.from_numpy(data.train_images[:3]))[0])
    assert first.startswith("Alice was beginning to get very tired")
    assert len(data.sample.vocabulary) == 1024


def test_the_test_split_is_another_part_of_the_text(tmp_path: Path) -> None:
    words = [f"w{i}" for i in range(400)]
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "one.txt").write_text(" ".join(words), encoding="utf-8")
    data = build("datasets", "text", {"root": str(tmp_path), "length": 4}).load()
    train, test = (
        "".join("".join(row) for row in data.sample.read(torch.from_numpy(images)))
        for images in (data.train_images[data.train_labels == 0], data.test_images[data.test_labels == 0])
    )
    assert " ".join(words).startswith(train)
    assert test in " ".join(words)
    assert not set(train.split()) & set(test.split()[1:])


def test_learnt_tokens_are_the_same_every_time() -> None:
    again = build("datasets", "text", {}).load()
    np.testing.assert_array_equal(again.train_images, authors().train_images)
    assert again.sample == authors().sample


@pytest.mark.parametrize(
    ("files", "parameters", "message"),
    [
        ({}, {}, "has 0 class folders"),
        ({"a/x.txt": b"few words", "b/y.md": b"more"}, {}, "has no text"),
        ({"a/x.txt": b"\xff\xfe", "b/y.txt": b"more"}, {}, "expected a text in UTF-8"),
        ({"a/x.txt": b"a b c " * 50, "b/y.txt": b"a b c"}, {}, "class 'b' has no training text of 16 tokens"),
        ({"a/x.txt": b"a b c " * 50, "b/y.txt": b"a b c " * 50}, {"tokenizer": "no.json"}, "data.tokenizer: no.json"),
    ],
)
def test_what_is_wrong_with_a_folder_is_said(tmp_path: Path, files, parameters, message) -> None:  # type: ignore[no-untyped-def]
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        build("datasets", "text", {"root": str(tmp_path), **parameters}).load()


def test_a_users_own_tokenizer_is_taken(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    own = Tokenizer(models.WordLevel(unk_token="?"))
    own.pre_tokenizer = pre_tokenizers.Whitespace()
    own.train_from_iterator(["the cat sat on the mat"], trainers.WordLevelTrainer(special_tokens=["?"]))
    own.save(str(tmp_path / "own.json"))
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.txt").write_text("the cat sat on the dog " * 20)
    data = build(
        "datasets", "text", {"root": str(tmp_path), "tokenizer": str(tmp_path / "own.json"), "length": 6}
    ).load()
    [words, *_] = data.sample.read(torch.from_numpy(data.train_images[:1]))
    assert [word.strip() for word in words] == ["the", "cat", "sat", "on", "the", "?"]


# ---- models ----


@pytest.mark.engine
@pytest.mark.parametrize("name", MODELS)
def test_a_model_learns_who_wrote_a_text(name: str) -> None:
    model = reader(name, epochs=6)
    data = authors()
    images = torch.from_numpy(data.test_images[np.arange(len(data.test_labels))])
    with torch.no_grad():
        right = (model(images).argmax(1) == torch.from_numpy(data.test_labels)).double().mean()
    assert right > 0.5  # three classes


@pytest.mark.parametrize("name", MODELS)
def test_all_ways_to_a_gradient_agree(name: str) -> None:
    model = reader(name)
    images, labels = windows(4)
    weights = weights_of(model)
    each = per_sample_gradients(model, weights, {}, images, labels)
    many = many_gradients(model, weights, {}, images[:, None], labels[:, None])
    for i in range(4):
        alone, _ = gradient(model, weights, {}, images[i : i + 1], labels[i : i + 1])
        for parameter, value in alone.items():
            torch.testing.assert_close(each[parameter][i], value, rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(many[parameter][i], value, rtol=1e-4, atol=1e-6)


def test_attention_is_pytorchs() -> None:
    from rayfed.models.text_transformer import Attention

    torch.manual_seed(0)
    own, other = Attention(12, 3), nn.MultiheadAttention(12, 3, batch_first=True)
    parts = [own.query, own.key, own.value]
    state = {
        "in_proj_weight": torch.cat([part.weight for part in parts]),
        "in_proj_bias": torch.cat([part.bias for part in parts]),
        "out_proj.weight": own.out.weight,
        "out_proj.bias": own.out.bias,
    }
    other.load_state_dict(state)
    sequence = torch.randn(2, 5, 12)
    torch.testing.assert_close(own(sequence), other(sequence, sequence, sequence)[0])


def test_the_recurrent_unit_is_pytorchs() -> None:
    from rayfed.models.text_rnn import GatedRecurrent

    torch.manual_seed(0)
    own, other = GatedRecurrent(6, 5), nn.GRU(6, 5, batch_first=True)
    other.load_state_dict(
        {
            "weight_ih_l0": own.given.weight,
            "bias_ih_l0": own.given.bias,
            "weight_hh_l0": own.kept.weight,
            "bias_hh_l0": own.kept.bias,
        }
    )
    sequence = torch.randn(3, 7, 6)
    torch.testing.assert_close(own(sequence), other(sequence)[0])


def test_a_transformer_works_for_weights_of_its_own_under_vmap() -> None:
    model, (images, _) = reader(layers=1), windows(3)
    weights = [weights_of(reader(layers=1, seed=s)) for s in range(2)]
    stacked = {name: torch.stack([w[name] for w in weights]) for name in weights[0]}
    together = vmap(lambda w: functional_call(model, w, (images,)))(stacked)
    for one, w in zip(together, weights, strict=True):
        torch.testing.assert_close(one, functional_call(model, w, (images,)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "defence",
    [Gaussian(sigma=0.1), Prune(ratio=0.9), Quantise(bits=8), DpSgd(clip=0.5, noise_multiplier=1e-9, delta=1e-3)],
    ids=lambda d: type(d).__name__,
)
def test_defences_of_updates_take_texts(defence) -> None:  # type: ignore[no-untyped-def]
    model, (images, labels) = reader(), windows(4)
    plain = observed(model, images, labels, classes=3).gradient
    sent = observed(model, images, labels, [defence], classes=3).gradient
    assert all(sent[name].shape == plain[name].shape for name in plain)
    if isinstance(defence, DpSgd):
        each = per_sample_gradients(model, weights_of(model), {}, images, labels)
        norms = torch.stack([t.flatten(1).square().sum(1) for t in each.values()]).sum(0).sqrt()
        assert (norms > 0.5).all()
        expected = sum(each["embed.table.weight"][i] * 0.5 / norms[i] for i in range(4)) / 4
        torch.testing.assert_close(sent["embed.table.weight"], expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_texts_refuses_pictures(name: str) -> None:
    with pytest.raises(UserError, match="needs texts, but the samples are 1x28x28"):
        build_model(name, {}, (1, 28, 28), 10, 0)


class Net(nn.Module):
    """A user's own, which knows nothing of rayfed."""

    def __init__(self, num_classes: int, vocabulary: int = 1024) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(vocabulary, 16), nn.Linear(16, num_classes)

    def forward(self, input_ids: Tensor) -> Tensor:
        assert input_ids.dtype == torch.int64
        assert input_ids.ndim == 2
        logits: Tensor = self.head(self.words(input_ids).mean(1))
        return logits


@pytest.mark.engine
def test_a_users_module_takes_the_numbers_of_tokens(tmp_path: Path) -> None:
    """A whole run: trained, tested, defended, attacked and scored."""
    scenario = parse(f"""
name: own
data: {{name: text, train_samples: 40, test_samples: 20}}
model: {__name__}:Net
federation: {{rounds: 2, clients: 2}}
arms: {{none: [], private: [{{name: dp_sgd, clip: 1, noise_multiplier: 1, delta: 0.001}}]}}
attacks:
  - {{name: embedding_rows, observes: gradient, batch_size: 1, rounds: [1]}}
  - {{name: tag, iterations: 5, observes: gradient, batch_size: 1, rounds: [1]}}
  - {{name: membership, knowledge: [candidates]}}
""")
    folder = runner.launch(scenario, str(tmp_path), local, Progress())
    attacks = folder.read_table("attacks").to_pylist()
    [found] = [row for row in attacks if (row["arm"], row["attack"]) == ("none", "embedding_rows")]
    assert found["rouge1"] > 0.9  # its tokens, in no order
    assert all(len(row["true"]) == 16 for row in folder.read_table("texts").to_pylist())


def test_a_users_module_with_too_few_tokens_is_refused() -> None:
    with pytest.raises(UserError, match=r"fails on texts of 16 tokens: .*; set its vocabulary to 1024 or more"):
        build_model(f"{__name__}:Net", {"vocabulary": 1023}, authors().sample, 3, seed=0)


# ---- samples ----


SPECS = [
    Pixels(3, 4, 5),
    Tokens(tuple(map(str, range(300))), 7),
    Records((Column("age", (), 1.0, 9.0, 2.0), Column("town", ("Oslo", "Rom")))),
]


@pytest.mark.parametrize("sample", SPECS, ids=lambda sample: sample.modality)
def test_inputs_are_what_the_sample_says(sample: SampleSpec) -> None:
    drawn = np.random.default_rng(0)
    stored = drawn.integers(sample.largest if sample.modality == "tokens" else 256, size=(4, *sample.shape))
    made = (sample.tensor(stored.astype(sample.stored[0])), sample.blank(4), sample.trial(), sample.noise(50))
    for inputs in made:
        assert inputs.dtype == sample.dtype
        assert inputs.shape[1:] == sample.shape
        assert len(sample.shape) == len(sample.axes)
        assert inputs.min() >= 0
        assert inputs.max() <= sample.largest
    assert {int(part) for part in sample.trial().unique()} == {0, sample.largest}


def test_data_sets_are_told_in_words() -> None:
    assert [sample.describe(30, 7) for sample in SPECS] == [
        "30 training and 7 test images of 3x4x5",
        "30 training texts of 7 tokens and 7 test texts",
        "30 training records of 2 columns (3 inputs: one per category) and 7 test records",
    ]


def test_attackers_are_not_told_how_a_table_varies() -> None:
    assert [column.deviation for column in SPECS[2].published().columns] == [0.0, 0.0]
    assert SPECS[1].published() == SPECS[1]


# ---- scores ----


def test_texts_are_matched_by_their_tokens_and_scored() -> None:
    true = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 300]])
    guess = torch.tensor([[5, 6, 7, 9], [2, 1, 3, 4]])
    texts = Tokens(tuple("abcdefghij"), 4)
    assert assign(true, guess, texts).tolist() == [1, 0]
    scorer = Scorer(("token_accuracy", "rouge1", "rouge2", "rougeL"), sample=texts)
    first, second = scorer.score(true, torch.tensor([0, 1]), guess, torch.tensor([1, 0]))
    # 1 2 3 4 against 2 1 3 4: four shared tokens, one shared pair of three, the longest common subsequence has three
    assert (first["token_accuracy"], first["rouge1"]) == (0.5, 1.0)
    assert first["rouge2"] == pytest.approx(1 / 3)
    assert first["rougeL"] == pytest.approx(3 / 4)
    assert (second["token_accuracy"], second["rouge1"]) == (0.75, 0.75)
    assert Tokens(tuple("abc"), 4).read(true)[1] == ["<5>", "<6>", "<7>", "<300>"]


# ---- scenarios ----


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("attacks: [dlg]", "attacks.0: dlg supports pixels or records, but the samples of data 'text' are tokens"),
        ("defences: [mixup]", "defences.0: mixup supports pixels or records"),
        ("defences: [{name: soteria, ratio: 0.5}]", "soteria supports"),
        ("arms: {a: [refiner]}", "refiner supports pixels, but"),
        ("metrics: {names: [psnr]}", "metrics.names: psnr does not apply to tokens"),
        ("metrics: {success: {ssim: 0.5}}", "metrics.success: ssim does not apply to tokens"),
        ("arms: {a: {model: {name: lenet}}}", "lenet supports pixels or records"),
    ],
)
def test_what_means_nothing_for_texts_is_refused_before_a_run(change: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse(SCENARIO % change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("attacks: [dager]", "attacks.0: dager supports tokens, but the samples of data 'digits' are pixels"),
        ("model: text_rnn", "model: text_rnn supports tokens, but the samples of data 'digits' are pixels"),
        ("metrics: {names: [rougeL]}", "rougeL does not apply to pixels"),
    ],
)
def test_what_is_for_texts_is_refused_elsewhere(change: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse(f"{{name: t, federation: {{rounds: 1, clients: 2}}, {change}}}")


def test_metrics_follow_the_data() -> None:
    texts, images = parse(SCENARIO % "seed: 0"), parse("{name: t, federation: {rounds: 1, clients: 2}}")
    assert texts.metrics.names == ["token_accuracy", "rouge1", "rouge2", "rougeL", "label_accuracy"]
    assert texts.metrics.success == {"token_accuracy": 0.9}
    assert images.metrics.names == ["mse", "psnr", "ssim", "label_accuracy"]
    own = parse(SCENARIO % "metrics: {names: [rouge1]}")
    assert own.metrics.names == ["rouge1"]
    assert own.metrics.success == {}
    assert parse(texts.dump()) == texts


def test_a_table_too_small_for_the_data_is_refused() -> None:
    text = "{name: t, data: text, model: {name: text_rnn, vocabulary: 500}, federation: {rounds: 1, clients: 2}}"
    with pytest.raises(
        UserError, match=r"fails on texts of 16 tokens: IndexError: .*; set its vocabulary to 1024 or more"
    ):
        prepare_inputs(parse(text))
