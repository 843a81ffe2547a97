"""Models of Hugging Face transformers, loaded from a local folder.

Source: Wolf et al. 2020, "Transformers: State-of-the-Art Natural Language Processing". The attention implementation is
`eager`, whose basic operations support `torch.func.vmap` and second derivatives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.func import vmap

from rayfed.core.files import local_path
from rayfed.errors import UserError, require_extra
from rayfed.models.notes import note
from rayfed.models.torchvision_models import repeat_grey
from rayfed.models.trained import head_names
from rayfed.registry import component
from rayfed.samples import Modality

Task = Literal["image_classification", "sequence_classification", "token_classification", "causal_lm", "masked_lm"]
_CLASSES: dict[Task, str] = {
    "image_classification": "AutoModelForImageClassification",
    "sequence_classification": "AutoModelForSequenceClassification",
    "token_classification": "AutoModelForTokenClassification",
    "causal_lm": "AutoModelForCausalLM",
    "masked_lm": "AutoModelForMaskedLM",
}
_SHOWN = 4


@component
class HuggingFace:
    """Hugging Face model from a local folder of `save_pretrained`; short form: `hf:FOLDER`. Needs the extra `hub`.

    The folder has `config.json` and weights, which are read only as data. Its code is never run, and nothing is
    downloaded. A head that is missing, or has other classes, is initialised anew, with a note. For texts, the inputs
    are token numbers, and padding is masked in attention.
    """

    takes: ClassVar[tuple[Modality, ...]] = ("pixels", "tokens")

    path: Path
    """Folder of the model; `~` and environment variables are expanded, and `package:NAME/FOLDER` is a folder of a
    package."""
    task: Task | None = None
    """Task of the model's head. Default: classification of whole samples, images or texts. The task sets the default
    loss: `causal_lm` and `masked_lm` have their own, `token_classification` has place_cross_entropy."""
    dropout: float | None = None
    """Probability of all of the model's dropouts. Default: the probabilities in the config. 0 disables dropout."""

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """Return the network for images (N, C, H, W) or texts (N, L) int64, with logits (N, classes).

        Raises `UserError` if the folder has no such model, or if tensors outside its head are missing or have other
        shapes.
        """
        require_extra("hub", "a model of Hugging Face", "transformers")
        import transformers

        folder = _folder(self.path)
        task: Task = self.task or ("sequence_classification" if len(shape) == 1 else "image_classification")
        model = self._loaded(transformers, folder, task, classes)
        if len(shape) == 1:
            _read_tokens(model, shape[0])
        elif shape[0] == 1 and getattr(model.config, "num_channels", 3) == 3:
            model.register_forward_pre_hook(repeat_grey)
        model.register_forward_hook(_logits)
        network: nn.Module = model
        return network

    def _loaded(self, transformers: Any, folder: Path, task: Task, classes: int) -> Any:
        """Return the folder's model, with notes on tensors that are not from the folder."""
        logging = transformers.utils.logging
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        try:
            config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
            if task not in ("causal_lm", "masked_lm"):
                config.num_labels = classes
            for name, value in config.to_dict().items():
                if self.dropout is not None and "drop" in name and isinstance(value, float):
                    setattr(config, name, self.dropout)
            found, told = getattr(transformers, _CLASSES[task]).from_pretrained(
                folder,
                config=config,
                local_files_only=True,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                attn_implementation="eager",
                dtype=torch.float32,
            )
        except Exception as error:  # transformers and its models may raise any type
            said = " ".join(str(error).split())[:300]
            raise UserError(
                f"{folder} has no model for {task.replace('_', ' ')} that transformers can load: {said}; expected the "
                f"files of save_pretrained(): config.json, and model.safetensors or pytorch_model.bin"
            ) from error
        _check(found, folder, told)
        return found


def _folder(path: Path) -> Path:
    folder = local_path(path)
    if not (folder / "config.json").is_file():
        what = "has no config.json" if folder.is_dir() else "is not a folder"
        raise UserError(
            f"model.path: {folder} {what}: rayfed downloads nothing, so give the path of a local folder with a Hugging "
            f"Face model, written by save_pretrained() or downloaded from the hub (in a cache: "
            f"models--NAME/snapshots/REVISION)"
        )
    return folder


def _check(model: nn.Module, folder: Path, told: Any) -> None:
    """Note which tensors are not from the folder; raise `UserError` for any outside head and pooler."""
    told = told if isinstance(told, dict) else vars(told)
    missing = sorted(told["missing_keys"])
    misshapen = sorted(key[0] if isinstance(key, tuple) else key for key in told["mismatched_keys"])
    head, base = head_names(model), str(getattr(model, "base_model_prefix", ""))
    behind = bool(base) and hasattr(model, base)
    anew = [
        name
        for name in dict.fromkeys((*missing, *misshapen))
        if name in head or ".pooler." in f".{name}" or (behind and not name.startswith(f"{base}."))
    ]
    if lost := [name for name in (*missing, *misshapen) if name not in anew]:
        raise UserError(
            f"the weights in {folder} do not match config.json: {len(lost)} tensors are missing or have another shape, "
            f"{_some(lost)}"
        )
    if anew:
        note(
            model,
            f"parameters initialised anew, because they are missing or have another size in {folder.name}/: "
            f"{_some(anew)}",
        )
    if spare := sorted(told["unexpected_keys"]):
        note(model, f"{len(spare)} tensors in {folder.name}/ are not in the model and are ignored: {_some(spare)}")


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")


def _logits(module: nn.Module, inputs: Any, output: Any) -> Tensor:
    """Return only the logits of a Hugging Face model's output, as a forward hook."""
    logits: Tensor = output.logits
    return logits


Mask = Callable[[Tensor], Tensor]


def _read_tokens(model: Any, length: int) -> None:
    """Prepare a model for texts (N, length), with attention to all tokens except padding.

    Raises `UserError` for texts longer than its positions.
    """
    config, most = model.config, places_for_tokens(model)
    if most is not None and length > most:
        raise UserError(
            f"data.length: texts have {length} tokens, but the model has {most} positions: lower data.length"
        )
    if config.pad_token_id is None:  # common for models trained without padding
        ends = config.eos_token_id
        config.pad_token_id = ends[0] if isinstance(ends, list) else ends
    if config.pad_token_id is not None:
        model.register_forward_pre_hook(Attended(config.pad_token_id, _each_place), with_kwargs=True)
        _choose_mask(model, length)


def places_for_tokens(model: Any) -> int | None:
    """Return the maximum number of tokens of a Hugging Face model's texts; None if the config has no maximum."""
    most = getattr(model.config, "max_position_embeddings", None) or getattr(model.config, "n_positions", None)
    return None if most is None else int(most)


def _each_place(kept: Tensor) -> Tensor:
    """Return the attention mask of positions (N, L): 1 for tokens and 0 for padding."""
    return kept.long()


def _each_pair(kept: Tensor) -> Tensor:
    """Return the additive attention mask of pairs (N, 1, L, L), for bidirectional attention."""
    lowest = torch.finfo(torch.float32).min
    return torch.where(kept, 0.0, lowest)[:, None, None, :].expand(-1, 1, kept.shape[1], -1)


class Attended:
    """Forward pre-hook that adds the attention mask of a text; a text of only padding is not masked.

    `before` is the number of positions before a text that are never masked: those of a soft prompt.
    """

    def __init__(self, pad: int, mask: Mask) -> None:
        self.pad, self.mask, self.before = pad, mask, 0

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Return the inputs together with the mask."""
        tokens = inputs[0]
        kept = tokens != self.pad
        kept = kept | ~kept.any(1, keepdim=True)
        kept = torch.cat([kept.new_ones(len(kept), self.before), kept], 1)
        return inputs, {**named, "attention_mask": self.mask(kept)}


def _choose_mask(model: Any, length: int) -> None:
    """Use the mask of pairs if the mask of positions fails under vmap and both give the same result."""
    [hook] = [h for h in model._forward_pre_hooks.values() if isinstance(h, Attended)]
    other = next(token for token in range(2) if token != hook.pad)
    texts = torch.full((2, length), other)
    texts[1, length // 2 :] = hook.pad
    was = model.training
    model.eval()
    with torch.no_grad():
        expected = model(texts).logits
        if not _vectorises(model, texts):
            hook.mask = _each_pair
            try:
                same = torch.allclose(model(texts).logits, expected, atol=1e-5)
            except Exception:  # the model does not support such a mask
                same = False
            if not same:
                hook.mask = _each_place
    model.train(was)


def _vectorises(model: Any, texts: Tensor) -> bool:
    try:
        vmap(lambda text: model(text[None]).logits)(texts)
    except RuntimeError:
        return False
    return True
