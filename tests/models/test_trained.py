"""What of a model is trained, and that nothing else is sent: chosen layers, and adapters beside frozen ones."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn

from rayfed import scenario as scenarios
from rayfed.errors import UserError
from rayfed.gradients import batch_loss, per_sample_gradients
from rayfed.models.trained import blocks_of, frozen_names, parameters_of
from rayfed.runs import runner
from rayfed.samples import Pixels, SampleSpec, Tokens
from rayfed.scenario import AttackSpec, Scenario, resolve
from rayfed.simulation.client.arm import Arm, build_arm
from rayfed.simulation.client.server_message import Sent
from rayfed.simulation.client.visit import ClientVisit
from rayfed.simulation.executors.local import local
from rayfed.simulation.executors.worker import ClientWorker
from rayfed.simulation.inputs import prepare_inputs
from rayfed.simulation.progress import Progress
from rayfed.store.folder import RunFolder
from rayfed.threat_model.observations import ObservationBuilder
from tests.conftest import imported

transformers = imported("transformers", "hub")
timm = imported("timm", "hub")
peft = imported("peft", "hub")

WORDS = tuple(f" w{n}" for n in range(1024))
TEXTS, SHORT = Tokens(WORDS, 16), 12


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Small language models of two blocks, with the vocabulary of the data set `text`."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    bert = transformers.BertConfig(vocab_size=1024, max_position_embeddings=16, num_labels=3, pad_token_id=0, **sizes)
    gpt2 = transformers.GPT2Config(vocab_size=1024, n_embd=16, n_layer=2, n_head=2, n_positions=16, eos_token_id=0)
    found = {}
    for name, config in {"bert": bert, "gpt2": gpt2}.items():
        found[name] = tmp_path_factory.mktemp(name)
        transformers.AutoModelForSequenceClassification.from_config(config).save_pretrained(found[name])
    return found


def arm(model: Mapping[str, Any], sample: SampleSpec, classes: int, seed: int = 0) -> Arm:
    document = {"name": "t", "federation": {"rounds": 1, "clients": 1}, "model": dict(model)}
    [spec] = resolve(Scenario.model_validate(document)).values()
    return build_arm(spec, sample, classes, seed)


def vision(layers: list[str] | None, **rest: Any) -> Arm:
    model = {"name": "timm:test_resnet", "train": {"layers": layers, **rest}}
    return arm(model, Pixels(3, 32, 32), 5)


def reader(folder: Path, train: Mapping[str, Any]) -> Arm:
    sample = Tokens(WORDS, SHORT) if train.get("prompt", {}).get("tokens", 0) > 1 else TEXTS
    return arm({"name": f"hf:{folder}", "dropout": 0.0, "train": train}, sample, 3)


def test_words_and_patterns_choose_layers() -> None:
    model = torchvision.models.resnet18()
    names = [name for name, _ in model.named_parameters()]
    assert parameters_of(model, ["head"]) == {"fc.weight", "fc.bias"}
    assert parameters_of(model, ["*"]) == set(names)
    assert parameters_of(model, ["last block"]) == {n for n in names if n.startswith(("layer4.1.", "fc."))}
    assert parameters_of(model, ["last 3 blocks"]) == {
        n for n in names if n.startswith(("layer3.1.", "layer4.", "fc."))
    }
    assert parameters_of(model, ["layer2"]) == {n for n in names if n.startswith("layer2.")}
    assert parameters_of(model, ["layer*.0.conv1"]) == {f"layer{i}.0.conv1.weight" for i in (1, 2, 3, 4)}
    assert parameters_of(model, ["bias"]) == {n for n in names if n.endswith("bias")}
    norms = {n for n in names if ".bn" in n or n.startswith("bn1") or "downsample.1" in n}
    assert parameters_of(model, ["norms", "head"]) == norms | {"fc.weight", "fc.bias"}
    with pytest.raises(UserError, match=r"'layer9' matches no parameter.*did you mean"):
        parameters_of(model, ["head", "layer9"])
    with pytest.raises(UserError, match="'last 9 blocks' cannot be selected: the model has 8"):
        parameters_of(model, ["last 9 blocks"])
    with pytest.raises(UserError, match="the model has no stack of blocks"):
        parameters_of(nn.Sequential(nn.Linear(2, 2)), ["last block"])


@pytest.mark.parametrize(
    ("name", "blocks", "last"),
    [
        ("vit_b_16", 12, "encoder.layers.encoder_layer_11"),
        ("efficientnet_b0", 16, "features.7.0"),
        ("densenet121", 58, "features.denseblock4.denselayer16"),
        ("swin_t", 12, "features.7.1"),
        ("vgg11", 0, None),
    ],
)
def test_blocks_are_those_of_the_architecture(name: str, blocks: int, last: str | None) -> None:
    with torch.device("meta"):
        found = blocks_of(torchvision.models.get_model(name))
    assert (len(found), found[-1] if found else None) == (blocks, last)


def test_blocks_of_language_models_end_with_what_stands_behind_them(folders: dict[str, Path]) -> None:
    bert, gpt2 = (reader(folders[name], {"layers": ["last block"]}) for name in ("bert", "gpt2"))
    assert {n.split(".")[1] for n in bert.weights} == {"encoder", "pooler", "weight", "bias"}
    assert all("layer.1." in n for n in bert.weights if "encoder" in n)
    assert {".".join(n.split(".")[:3]) for n in gpt2.weights} == {"transformer.h.1", "transformer.ln_f.weight"} | {
        "transformer.ln_f.bias",
        "score.weight",
    }


def test_only_what_is_trained_is_sent_and_everybody_has_the_rest() -> None:
    whole, head = vision(["*"]), vision(["head"])
    assert set(head.weights) == {"fc.weight", "fc.bias"}
    assert head.buffers == {}
    assert not frozen_names(whole.model)
    assert set(whole.weights) == set(head.weights) | {
        n for n in head.frozen if n in dict(whole.model.named_parameters())
    }
    state = {**head.weights, **head.frozen}
    assert all(torch.equal(t, state[name]) for name, t in whole.model.state_dict().items())


def test_statistics_of_frozen_norms_stay_those_of_the_checkpoint() -> None:
    built = vision(["last block"])
    own = {name: m for name, m in built.model.named_modules() if isinstance(m, nn.BatchNorm2d)}
    last = blocks_of(built.model)[-1]
    assert {name for name, norm in own.items() if norm.training} == {name for name in own if name.startswith(last)}
    assert {name.rpartition(".")[0] for name in built.buffers} == {name for name in own if name.startswith(last)}
    norms = vision(["norms"])
    assert all(m.training for m in norms.model.modules() if isinstance(m, nn.BatchNorm2d))
    assert len(norms.buffers) == 3 * len(own)


def test_adapters_begin_as_the_model_that_they_stand_beside(folders: dict[str, Path]) -> None:
    texts = torch.randint(1, 1024, (4, 16))
    for name in ("bert", "gpt2"):
        plain, adapted = reader(folders[name], {"layers": ["*"]}), reader(folders[name], {"lora": {"rank": 4}})
        with torch.no_grad():
            torch.testing.assert_close(adapted.model.eval()(texts), plain.model.eval()(texts))
    targets = {n.split(".lora_")[0].rpartition(".")[2] for n in adapted.weights if "lora" in n}
    assert targets == {"c_attn"}
    assert {n for n in adapted.weights if "lora" not in n} == {"score.weight"}
    sizes = {n.rpartition("lora_")[2]: tuple(t.shape) for n, t in adapted.weights.items() if "lora" in n}
    assert sizes == {"A.default.weight": (4, 16), "B.default.weight": (48, 4)}


def test_adapters_are_those_of_the_equation(folders: dict[str, Path]) -> None:
    """W + alpha / rank B A in the place of W, without peft."""
    built = reader(folders["bert"], {"lora": {"rank": 3, "alpha": 5, "targets": ["query", "dense"]}})
    plain = reader(folders["bert"], {"layers": ["*"]})
    state = {name: torch.randn_like(t) * 0.2 if "lora" in name else t for name, t in built.weights.items()}
    texts = torch.randint(1, 1024, (4, 16))
    merged = {name: t.clone() for name, t in plain.model.named_parameters()}
    for name, a in state.items():
        if "lora_A" in name:
            b = state[name.replace("lora_A", "lora_B")]
            merged[name.replace("lora_A.default.", "")] += 5 / 3 * b @ a
    with torch.no_grad():
        found = torch.func.functional_call(built.model.eval(), state, (texts,))
        expected = torch.func.functional_call(plain.model.eval(), merged, (texts,))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["bert", "gpt2"])
@pytest.mark.parametrize("padded", [False, True])
def test_a_prompt_answers_as_peft_s(folders: dict[str, Path], name: str, padded: bool) -> None:
    built = reader(folders[name], {"prompt": {"tokens": 3}})
    assert {n: tuple(t.shape) for n, t in built.weights.items() if n == "soft_prompt"} == {"soft_prompt": (3, 16)}
    plain = reader(folders[name], {"layers": ["*"]})
    table, state = built.model.get_input_embeddings().weight, {n: torch.randn_like(t) for n, t in built.weights.items()}
    assert all((table == vector).all(1).any() for vector in built.weights["soft_prompt"])  # tokens of the vocabulary
    whole = plain.model.eval()
    whole._forward_hooks.clear()  # theirs reads more than logits off an output
    whole._forward_pre_hooks.clear()
    for n in state.keys() - {"soft_prompt"}:
        whole.get_parameter(n).data = state[n]
    config = peft.PromptTuningConfig(
        task_type="SEQ_CLS", num_virtual_tokens=3, token_dim=16, num_layers=2, num_attention_heads=2
    )
    theirs = peft.PeftModelForSequenceClassification(whole, config).eval()
    trained = sum(p.numel() for n, p in theirs.named_parameters() if p.requires_grad and "prompt" in n)
    assert trained == state["soft_prompt"].numel()
    texts = torch.randint(1, 1024, (4, SHORT), generator=torch.Generator().manual_seed(0))
    if padded:
        texts[1, 5:] = 0
    with torch.no_grad():
        theirs.prompt_encoder["default"].embedding.weight.copy_(state["soft_prompt"])
        found = torch.func.functional_call(built.model.eval(), state, (texts,))
        expected = theirs(input_ids=texts, attention_mask=(texts != 0).long()).logits
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_a_prompt_that_cannot_be_is_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(UserError, match="1 vectors and texts of 16 tokens exceed the model's 16 positions"):
        reader(folders["bert"], {"prompt": {"tokens": 1}})
    with pytest.raises(UserError, match=r"model\.train\.prompt"):
        vision(None, prompt={"tokens": 2})


@pytest.mark.parametrize("name", ["bert", "gpt2", "convolutions", "prompt"])
def test_gradients_of_single_samples_go_through_adapters(folders: dict[str, Path], name: str) -> None:
    """In one call as one by one, padding and all."""
    generator = torch.Generator().manual_seed(0)
    if name == "prompt":
        built = reader(folders["bert"], {"prompt": {"tokens": 4}, "lora": {"rank": 2}})
        inputs = torch.randint(1, 1024, (5, SHORT), generator=generator)
        inputs[1, 9:] = inputs[3, 4:] = 0
    elif name == "convolutions":
        built = vision(["head"], lora={"rank": 2, "targets": ["conv2"]})
        inputs = torch.rand(5, 3, 32, 32, generator=generator)
    else:
        built = reader(folders[name], {"lora": {"rank": 4}})
        inputs = torch.randint(1, 1024, (5, 16), generator=generator)
        inputs[1, 9:] = inputs[3, 4:] = 0
    weights = {name: torch.randn(t.shape, generator=generator) * 0.2 for name, t in built.weights.items()}
    labels = torch.tensor([0, 1, 2, 1, 0])
    buffers = {**built.buffers, **built.frozen}
    gains = (n for n in buffers if n.endswith(("bn2.weight", "bn3.weight")))  # zero at first: no slope before them
    buffers |= {n: buffers[n] + 0.2 for n in gains}
    found = per_sample_gradients(built.model, weights, buffers, inputs, labels)
    for i in range(len(labels)):
        leaves = {n: w.clone().requires_grad_() for n, w in weights.items()}
        loss = batch_loss(built.model, leaves, buffers, inputs[i : i + 1], labels[i : i + 1])
        expected = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
        for n, g in expected.items():
            torch.testing.assert_close(found[n][i], g, atol=1e-6, rtol=1e-4)
    assert all(g.abs().max() > 0 for g in found.values())


@pytest.mark.parametrize(
    ("train", "problem"),
    [
        (
            {"lora": {"targets": ["nothing"]}},
            r"model\.train\.lora\.targets: the model has no layer named nothing: choose from bert",
        ),
        ({"lora": {"targets": ["bert.embeddings.LayerNorm"]}}, "peft cannot add adapters"),
    ],
)
def test_adapters_that_cannot_be_are_refused(folders: dict[str, Path], train: Any, problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        reader(folders["bert"], train)


def test_a_model_that_peft_does_not_know_wants_targets() -> None:
    with pytest.raises(UserError, match="list the layers that get adapters"):
        vision(None, lora={"rank": 2})


RUN = """
name: t
data: {{name: {data}, train_samples: 48, test_samples: 12{size}}}
model: {{name: "{model}", train: {train}{rest}}}
training: {{batch_size: 4, steps: 2, lr: 0.1}}
federation: {{rounds: 2, clients: 4}}
arms:
  none: []
  noise: [{{name: gaussian, sigma: 0.001}}]
  pruned: [{{name: prune, ratio: 0.5}}]
  private: [{{name: dp_sgd, clip: 1.0, noise_multiplier: 1.0, delta: 0.001}}]
  masked: {{protection: {{name: secure_aggregation, clip: 10}}}}
  median: {{aggregation: median}}
"""


def scenario(model: str, train: str) -> Scenario:
    image = model.startswith("timm")
    return scenarios.parse(
        RUN.format(
            data="digits" if image else "text",
            size=", size: 32" if image else ", length: 12" if train == PROMPT else "",
            model=model,
            train=train,
            rest="" if image else ", dropout: 0.0",
        )
    )


def played(s: Scenario, folder: Path) -> RunFolder:
    return runner.launch(s, str(folder), local, Progress())


LORA = "{lora: {rank: 2}}"
PROMPT = "{prompt: {tokens: 4}}"
HEAD = "{layers: [head]}"


@pytest.mark.engine
@pytest.mark.parametrize(
    ("model", "train"), [("bert", LORA), ("gpt2", LORA), ("bert", PROMPT), ("timm:test_resnet", HEAD)]
)
def test_defences_rules_and_channels_see_what_is_trained_alone(
    folders: dict[str, Path], tmp_path: Path, model: str, train: str
) -> None:
    s = scenario(f"hf:{folders[model]}" if model in folders else model, train)
    built = prepare_inputs(s).accounts[0].arm
    size = 4 * sum(t.numel() for t in (*built.weights.values(), *built.buffers.values()))
    assert size < 0.1 * 4 * sum(p.numel() for p in built.model.parameters())
    run = played(s, tmp_path)
    rows = run.read_table("rounds").to_pylist()
    assert {row["arm"] for row in rows} == set(s.arms)
    for row in rows:
        assert row["bytes_down"] == 4 * size
    clients = run.read_table("clients").to_pylist()
    assert 0 < max(row["sent_bytes"] for row in clients if row["arm"] == "none") <= size  # zeros are not sent
    guaranteed = [row for row in run.read_table("privacy").to_pylist() if row["arm"] == "private"]
    assert all(row["epsilon"] > 0 for row in guaranteed)


def client(s: Scenario) -> tuple[ClientWorker, Sent]:
    inputs = prepare_inputs(s)
    built = inputs.accounts[0].arm
    return ClientWorker(s, inputs.data, inputs.parts, torch.device("cpu")), Sent(0, built.weights, built.buffers)


@pytest.mark.parametrize("model", ["bert", "timm:test_resnet"])
def test_attackers_see_updates_of_what_is_trained_and_know_the_rest(folders: dict[str, Path], model: str) -> None:
    s = scenario(f"hf:{folders[model]}", LORA) if model in folders else scenario(model, HEAD)
    worker, sent = client(s)
    attack = AttackSpec(name="dlg", observes="gradient", batch_size=3, knowledge=["labels"])
    seen, truth = ObservationBuilder(worker).observe(ClientVisit("none", sent, 1), attack)
    built = worker.arm("none")
    assert set(seen.update) == set(seen.weights) == set(built.weights)
    everything = {**dict(built.model.named_parameters()), **dict(built.model.named_buffers())}
    assert set(seen.weights) | set(seen.buffers) == set(everything)
    leaves: dict[str, Tensor] = {name: w.clone().requires_grad_() for name, w in seen.weights.items()}
    loss = batch_loss(built.model, leaves, seen.buffers, truth.inputs, truth.labels)
    for (name, _), g in zip(leaves.items(), torch.autograd.grad(loss, list(leaves.values())), strict=True):
        torch.testing.assert_close(seen.gradient[name], g, atol=1e-6, rtol=1e-4)


ATTACKED = {
    "bert": ["embedding_rows", "dager", "tag"],
    "timm:test_resnet": ["analytic", "spear", "april", "dlg", "idlg"],
}


@pytest.mark.engine
@pytest.mark.parametrize(("model", "train"), [("bert", LORA), ("bert", HEAD), ("timm:test_resnet", HEAD)])
def test_attacks_play_or_say_what_they_lack(folders: dict[str, Path], tmp_path: Path, model: str, train: str) -> None:
    s = scenario(f"hf:{folders[model]}" if model in folders else model, train)
    document = s.model_dump(mode="json") | {"arms": {"none": []}}
    document["attacks"] = [
        {"name": name, "observes": "gradient", **({"iterations": 2} if name in ("tag", "dlg", "idlg") else {})}
        for name in ATTACKED[model]
    ]
    rows = played(scenarios.check_scenario(document, "t"), tmp_path).read_table("attacks").to_pylist()
    assert {row["attack"] for row in rows} == set(ATTACKED[model])
    for row in rows:
        assert row["status"] in ("ok", "diverged", "not applicable"), row
        assert row["status"] != "not applicable" or row["message"]
    silent = {row["attack"]: row["message"] for row in rows if row["status"] == "not applicable"}
    assert {"bert": {"embedding_rows"}, "timm:test_resnet": {"april"}}[model] <= set(silent)
