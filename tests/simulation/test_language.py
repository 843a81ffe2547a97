"""Language models and labels of tokens: losses as transformers computes them, masks, data, evaluation, whole runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor, nn

from rayfed import scenario
from rayfed.core import losses
from rayfed.core.losses import NO_TARGET, CausalLM, MaskedLM, PlaceCrossEntropy
from rayfed.data.sets.text_table import TextTable
from rayfed.errors import DataError, UserError
from rayfed.gradients import buffers_of, gradient, per_sample_gradients, weights_of
from rayfed.runs import runner
from rayfed.simulation.client.server_message import Sent
from rayfed.simulation.executors.local import local
from rayfed.simulation.executors.worker import ClientWorker
from rayfed.simulation.inputs import prepare_inputs
from rayfed.simulation.progress import Progress
from rayfed.simulation.rounds.evaluation import measure_baselines
from tests.helpers.language_fixtures import (
    MASK,
    PAD,
    SAMPLE,
    WORDS,
    folder,
    language_model,
    model,
    table,
    texts,
)

transformers = pytest.importorskip("transformers")


def shown(kind: str, inputs: Tensor, targets: Tensor, built: nn.Module) -> tuple[Tensor, Tensor]:
    return losses.get_loss(built).presented(inputs, targets, SAMPLE, torch.Generator().manual_seed(3))


# losses


@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_the_loss_is_that_of_transformers(kind: str) -> None:
    built = language_model(kind)
    inputs, targets = shown(kind, *texts(5, short=True), built)
    maker = transformers.AutoModelForCausalLM if kind == "gpt2" else transformers.AutoModelForMaskedLM
    own = maker.from_pretrained(folder(kind)).eval()
    own.load_state_dict(built.state_dict())
    built.eval()
    each = losses.get_loss(built)(built(inputs), targets, "none")
    for row in range(5):
        text, wanted = inputs[row : row + 1], targets[row : row + 1]
        expected = own(text, attention_mask=(text != PAD).long(), labels=wanted).loss
        torch.testing.assert_close(each[row], expected, rtol=1e-4, atol=1e-5)
    whole, wanted = texts(4)
    if kind == "gpt2":  # as many tokens in each: the mean of texts is that of tokens
        torch.testing.assert_close(losses.get_loss(built)(built(whole), wanted), own(whole, labels=wanted).loss)


def test_labels_of_tokens_have_the_loss_of_transformers() -> None:
    built = model("bert", PlaceCrossEntropy(), classes=3, task="token_classification").eval()
    inputs, _ = texts(2)
    targets = torch.randint(3, inputs.shape, generator=torch.Generator().manual_seed(1))
    targets[:, ::3] = NO_TARGET
    own = transformers.AutoModelForTokenClassification.from_pretrained(folder("bert"), num_labels=3).eval()
    own.load_state_dict(built.state_dict())
    torch.testing.assert_close(losses.get_loss(built)(built(inputs), targets), own(inputs, labels=targets).loss)
    right = losses.get_loss(built).right(built(inputs), targets)
    counted = targets != NO_TARGET
    expected = ((built(inputs).argmax(2) == targets) & counted).sum(1) / counted.sum(1)
    assert right is not None
    torch.testing.assert_close(right, expected.double())


@pytest.mark.parametrize("train", [None, "head", "lora"])
@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_gradients_of_texts_average_to_the_batchs(kind: str, train: str | None) -> None:
    from functools import partial

    from rayfed.models.lora import add_lora
    from rayfed.models.trained import choose

    built = language_model(kind)
    if train:
        lora = partial(add_lora, rank=2, alpha=4.0, targets=None, dropout=0.0)
        choose(built, ["head"], [lora] if train == "lora" else [])
    inputs, targets = shown(kind, *texts(4, short=True), built)
    weights, buffers = weights_of(built), buffers_of(built)
    together, _ = gradient(built, weights, buffers, inputs, targets)
    alone = per_sample_gradients(built, weights, buffers, inputs, targets)
    assert any(slope.any() for slope in together.values())
    for name, slope in together.items():
        torch.testing.assert_close(alone[name].mean(0), slope, rtol=1e-3, atol=1e-6)


def test_what_fills_a_text_up_counts_nothing() -> None:
    built = language_model("gpt2").eval()
    inputs, _ = texts(1)
    padded = torch.cat([inputs[:, :5], torch.full((1, 3), PAD)], 1)
    wanted = torch.where(padded == PAD, NO_TARGET, padded)
    short = losses.get_loss(built)(built(padded), wanted)
    by_hand = built(padded)[0, :4].log_softmax(1)[range(4), padded[0, 1:5]]
    torch.testing.assert_close(short, -by_hand.mean())


def test_a_text_without_targets_has_no_loss_and_no_slope() -> None:
    outputs = torch.randn(2, 8, 5, requires_grad=True)
    targets = torch.full((2, 8), NO_TARGET)
    targets[0, 3] = 1
    each = PlaceCrossEntropy()(outputs, targets, "none")
    assert each[1] == 0
    each.sum().backward()
    assert outputs.grad is not None
    assert not outputs.grad[1].any()


# masks


def test_tokens_are_masked_as_bert_does() -> None:
    inputs, targets = texts(4000)
    inputs[:, 0], targets[:, 0] = 1, 1
    asked, wanted = MaskedLM().presented(inputs, targets, SAMPLE, torch.Generator().manual_seed(0))
    drawn = wanted != NO_TARGET
    assert not drawn[:, 0].any()
    assert drawn.any(1).all()
    none_of_seven = 0.85**7  # such a text has one drawn all the same
    assert drawn[:, 1:].double().mean().item() == pytest.approx(0.15 + none_of_seven / 7, abs=0.01)
    kept, masked = (asked == inputs)[drawn].double().mean(), (asked == MASK)[drawn].double().mean()
    assert masked.item() == pytest.approx(0.8, abs=0.02)
    assert kept.item() == pytest.approx(0.1, abs=0.02)
    assert torch.equal(asked[~drawn], inputs[~drawn])
    assert torch.equal(wanted[drawn], inputs[drawn])
    assert torch.equal(MaskedLM().original(asked, wanted), inputs)


def test_special_tokens_alone_have_nothing_to_mask() -> None:
    inputs = torch.tensor([[1, 2, PAD, PAD, PAD, PAD, PAD, PAD]])
    asked, wanted = MaskedLM().presented(inputs, inputs.clone(), SAMPLE, torch.Generator())
    assert torch.equal(asked, inputs)
    assert (wanted == NO_TARGET).all()


def document(path: Any, kind: str = "gpt2", **changes: Any) -> dict[str, Any]:
    task = "causal_lm" if kind == "gpt2" else "masked_lm"
    return {
        "name": "t",
        "data": {"name": "text_table", "path": str(path), "length": 8},
        "model": {"name": "hf", "path": str(folder(kind)), "task": task, "dropout": 0.0},
        "training": {"batch_size": 8, "lr": 0.1},
        "federation": {"rounds": 2, "clients": 2},
        **changes,
    }


def test_masks_follow_from_seed_round_and_client(tmp_path: Path) -> None:
    s = scenario.check_scenario(document(table(tmp_path / "t.parquet"), "bert"), "t")
    made = prepare_inputs(s)
    worker = ClientWorker(s, made.data, made.parts, torch.device("cpu"))
    arm = worker.arm("none")

    def masks(round: int, client: int, few: bool = False) -> Tensor:
        rows = made.parts[client][:3] if few else made.parts[client]
        return worker.task("none", Sent(round, arm.weights, arm.buffers), client, rows, {}).data.labels

    assert torch.equal(masks(0, 0), masks(0, 0))
    assert torch.equal(masks(0, 0)[:3], masks(0, 0, few=True))
    assert not torch.equal(masks(0, 0), masks(1, 0))
    assert not torch.equal(masks(0, 0)[:20], masks(0, 1)[:20])


# data


def test_texts_without_classes_train_language_models_alone(tmp_path: Path) -> None:
    path = table(tmp_path / "t.parquet")
    data = prepare_inputs(scenario.check_scenario(document(path), "t")).data
    assert data.has_places
    assert [name.strip() for name in data.classes] == list(SAMPLE.vocabulary)
    assert np.array_equal(data.train_labels == NO_TARGET, np.asarray(data.train_images) == PAD)
    with pytest.raises(UserError, match=r"has texts without classes: .*label_column.* `model\.task: causal_lm`"):
        prepare_inputs(scenario.check_scenario(document(path, model={"name": "hf", "path": str(folder("bert"))}), "t"))


def test_the_loss_goes_with_the_task_unless_it_is_set(tmp_path: Path) -> None:
    path = table(tmp_path / "t.parquet")
    assert scenario.check_scenario(document(path), "t").loss.name == "causal_lm"
    assert scenario.check_scenario(document(path, "bert"), "t").loss.name == "masked_lm"
    own = {"name": "masked_lm", "share": 0.3}
    assert scenario.check_scenario(document(path, "bert", loss=own), "t").loss.parameters["share"] == 0.3


def test_partitions_go_by_the_classes_that_texts_have(tmp_path: Path) -> None:
    path = table(tmp_path / "t.parquet", label=[n % 3 for n in range(60)])
    partition = {"name": "dirichlet", "alpha": 0.5}
    data = prepare_inputs(scenario.check_scenario(document(path, partition=partition), "t")).data
    assert data.groups[1] == ("0", "1", "2")
    bare = table(tmp_path / "b.parquet")
    with pytest.raises(UserError, match="iid or quantity"):
        prepare_inputs(scenario.check_scenario(document(bare, partition=partition), "t"))


def words_and_tags(path: Path, **columns: Any) -> Path:
    texts = [["w1", "w2", "w3"], ["w4"], ["w5", "w6"], ["w7", "w8"], ["w9"], ["w1", "w5"]]
    tags = [["A", "B", "A"], ["B"], ["A", "A"], ["B", "A"], ["A"], ["A", "B"]]
    pq.write_table(pa.table({"tokens": texts, "tags": tags, **columns}), path)
    return path


def test_a_class_for_each_word_counts_at_its_first_token(tmp_path: Path) -> None:
    import tokenizers

    pieces = {w: n for n, w in enumerate(["[PAD]", "[CLS]", "[SEP]", "[UNK]", "un", "##seen", "sea"])}
    reader = tokenizers.Tokenizer(tokenizers.models.WordPiece(pieces, unk_token="[UNK]"))
    reader.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    marks = [("[CLS]", 1), ("[SEP]", 2)]
    reader.post_processor = tokenizers.processors.TemplateProcessing("[CLS] $A [SEP]", special_tokens=marks)
    reader.save(str(tmp_path / "tokenizer.json"))
    rows = {"tokens": [["unseen", "sea"]] * 5, "tags": [[3, 7]] * 5}
    pq.write_table(pa.table(rows), tmp_path / "t.parquet")
    data = TextTable(
        path=tmp_path / "t.parquet", text_column="tokens", label_column="tags", length=7, tokenizer=tmp_path
    ).load()
    assert np.asarray(data.train_images)[0].tolist() == [1, 4, 5, 6, 2, 0, 0]
    none = NO_TARGET
    assert data.train_labels[0].tolist() == [none, 0, none, 1, none, none, none]
    assert (data.classes, data.has_places) == (("3", "7"), True)


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"tags": [["A"]] * 6}, r"row 0 \(from 0\): 3 words and 1 classes, expected one class per word"),
        ({"tags": ["A"] * 6}, "column 'tags' is string, expected lists of classes"),
    ],
)
def test_what_is_wrong_in_lists_of_words_is_named(tmp_path: Path, columns: Any, says: str) -> None:
    path = words_and_tags(tmp_path / "t.parquet", **columns)
    with pytest.raises(DataError, match=says):
        TextTable(path=path, text_column="tokens", label_column="tags").load()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"loss": "cross_entropy"}, "has texts without classes"),
        ({"loss": "place_cross_entropy"}, "has texts without classes"),
        ({"data": "digits", "model": "lenet", "loss": "causal_lm"}, "needs texts, but data 'digits' has images"),
        ({"data": {"name": "text", "length": 8}, "model": "text_transformer", "loss": "masked_lm"}, "no mask token"),
        (
            {"data": {"name": "text", "length": 8}, "model": "text_transformer", "loss": "causal_lm"},
            "scores per position",
        ),
        (
            {"federation": {"rounds": 1, "clients": 2, "malicious": {"name": "label_flip", "clients": [0]}}},
            "per position",
        ),
    ],
)
def test_what_does_not_go_with_language_models_is_said_before_a_run(
    tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(UserError, match=says):
        prepare_inputs(scenario.check_scenario(document(table(tmp_path / "t.parquet"), **changes), "t"))


# evaluation


class Frequencies(nn.Module):
    """A model that gives every place the same scores."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.scores = nn.Parameter(torch.linspace(-2, 2, classes))

    def forward(self, numbers: Tensor) -> Tensor:
        return self.scores.expand(*numbers.shape, -1)


def test_perplexity_is_that_of_all_tokens_together(tmp_path: Path) -> None:
    changes = {"model": "tests.simulation.test_language:Frequencies", "loss": "causal_lm"}
    written = document(table(tmp_path / "t.parquet"), **changes)
    written["data"]["tokenizer"] = str(folder("gpt2"))
    s = scenario.check_scenario(written, "t")
    made = prepare_inputs(s)
    worker = ClientWorker(s, made.data, made.parts, torch.device("cpu"))
    arm, data = worker.arm("none"), made.data
    found = worker.evaluate("none", Sent(0, arm.weights, arm.buffers), 0, len(data.test_labels))
    predicted = data.test_labels[:, 1:]
    numbers = torch.from_numpy(predicted[predicted != NO_TARGET])
    nats = -torch.linspace(-2, 2, 100).log_softmax(0)[numbers]
    assert found.perplexity == pytest.approx(float(nats.mean().exp()), rel=1e-5)
    by_text = [
        float((-torch.linspace(-2, 2, 100).log_softmax(0))[torch.from_numpy(row[row != NO_TARGET])].mean())
        for row in predicted
    ]
    assert found.over(len(by_text)).loss == pytest.approx(np.mean(by_text), rel=1e-5)
    assert float(np.exp(np.mean(by_text))) != pytest.approx(found.perplexity, rel=1e-4)


def test_a_guess_names_each_token_as_often_as_it_occurs() -> None:
    labels = np.array([[5, 5, 6, NO_TARGET], [5, 7, NO_TARGET, NO_TARGET]])
    data = prepare_inputs(scenario.check_scenario({"name": "t", "federation": {"rounds": 1, "clients": 2}}, "t")).data
    from dataclasses import replace

    images = np.zeros((2, 4), np.int64)
    placed = replace(
        data,
        train_images=images,
        test_images=images,
        train_labels=labels,
        test_labels=labels,
        classes=tuple(map(str, range(8))),
        sample=SAMPLE,
        has_places=True,
    )
    found = measure_baselines(placed, CausalLM())
    assert found["baseline_perplexity"] == pytest.approx(5 / 3**0.6, rel=1e-9)
    assert found["baseline_accuracy"] == pytest.approx(min(1, 0.6 + 1.645 * (0.24 / 2) ** 0.5))
    assert measure_baselines(placed, PlaceCrossEntropy())["baseline_perplexity"] is None


@pytest.mark.engine
@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_a_language_model_learns_and_is_reported(tmp_path: Path, kind: str) -> None:
    repeated = [" ".join(WORDS[(start + 7 * i) % 20] for i in range(8)) for start in range(60)]
    pq.write_table(pa.table({"text": repeated}), tmp_path / "t.parquet")
    arms: dict[str, Any] = {"lora": {"model": {"train": {"lora": {"rank": 4}}}}}
    if kind == "gpt2":
        arms = {"dp": [{"name": "dp_sgd", "clip": 1.0, "epsilon": 8}]}
    training = {"optimiser": "adamw", "lr": 0.003, "batch_size": 12, "epochs": 5}
    written = document(tmp_path / "t.parquet", kind, training=training, arms={"none": [], **arms})
    run = runner.launch(scenario.check_scenario(written, "t"), str(tmp_path), local, Progress())
    last = {row["arm"]: row for row in run.read_table("rounds").to_pylist()[-2:]}
    assert last["none"]["baseline_perplexity"] == pytest.approx(20, rel=0.1)
    assert 1 < last["none"]["test_perplexity"] < 0.6 * len(SAMPLE.vocabulary)
    assert all(1 < row["test_perplexity"] < 1.1 * len(SAMPLE.vocabulary) for row in last.values())
    private = run.read_table("privacy").to_pylist()
    assert [row["epsilon"] for row in private if row["arm"] == "dp"] == [pytest.approx(8, abs=0.1)] * (kind == "gpt2")


@pytest.mark.engine
def test_labels_of_tokens_are_learnt(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(20, (80, 6), generator=generator).tolist()
    rows = {"tokens": [[WORDS[n] for n in text] for text in drawn], "tags": [[n % 2 for n in text] for text in drawn]}
    pq.write_table(pa.table(rows), tmp_path / "t.parquet")
    written = document(tmp_path / "t.parquet", "bert")
    written["data"] |= {"text_column": "tokens", "label_column": "tags"}
    written["model"]["task"] = "token_classification"
    written["training"] = {"optimiser": "adamw", "lr": 0.003, "batch_size": 8, "epochs": 4}
    run = runner.launch(scenario.check_scenario(written, "t"), str(tmp_path), local, Progress())
    last = run.read_table("rounds").to_pylist()[-1]
    assert last["test_accuracy"] > 0.9
    assert last["test_perplexity"] is None
