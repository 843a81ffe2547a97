"""Brief description of a model, from a forward pass: layers, first layer, head, norms."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from rayfed.models.build import draw_nothing, is_stochastic, moves_buffers
from rayfed.models.copying import copy_model
from rayfed.samples import SampleSpec


def described(model: nn.Module, sample: SampleSpec) -> Iterator[str]:
    """Yield lines of text that describe a model in its current modes; `sample` describes the model's inputs."""
    model = copy_model(model)
    layers = [module for module in _parts(model) if any(p.requires_grad for p in module.parameters(recurse=False))]
    counts = Counter(type(layer).__name__ for layer in layers)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    yield f"layers: {', '.join(f'{n} {name}' for name, n in counts.items())}; {trained:,} trainable parameters"
    if any(True for _ in model.children()) and (own := [name for name, _ in model.named_parameters(recurse=False)]):
        yield f"the model's own parameters: {', '.join(own)}"
    if frozen:
        numbers = sum(p.numel() for p in model.parameters() if not p.requires_grad)
        yield f"frozen: {len(frozen)} parameters ({frozen[0]}, ...) with {numbers:,} values, which are not sent"
    yield from _ends(model, sample)
    yield from _dependence(model, sample)


def _parts(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that users regard as layers: no outer model, no projection inside an attention."""
    inner = {id(module.out_proj) for module in model.modules() if isinstance(module, nn.MultiheadAttention)}
    alone = not any(True for _ in model.children())
    yield from (module for module in model.modules() if id(module) not in inner and (alone or module is not model))


def _ends(model: nn.Module, sample: SampleSpec) -> Iterator[str]:
    """Yield lines on the first layer that reads the input, and the last one that returns the output."""
    seen: list[tuple[str, nn.Module, Tensor]] = []

    def note(name: str, module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        read = [value for value in (*given, *named.values()) if isinstance(value, Tensor)]
        seen.extend((name, module, tensor) for tensor in read[:1])  # none if it computes weights from weights

    hooks = [
        module.register_forward_hook(
            lambda m, given, named, _, name=name: note(name, m, given, named), with_kwargs=True
        )
        for name, module in model.named_modules()
        if any(module is part for part in _parts(model)) and any(True for _ in module.parameters(recurse=False))
    ]
    inputs = sample.noise(2, torch.Generator().manual_seed(0))
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        output = model(inputs)
    for hook in hooks:
        hook.remove()
    if seen:
        (first, module, given), (last, head, _) = seen[0], seen[-1]
        same = given.numel() == inputs.numel() and torch.equal(given.flatten(), inputs.flatten())
        reads = "the input itself" if same else f"{tuple(given.shape[1:])} computed from the input"
        yield f"first: {first or 'the model'} ({type(module).__name__}) reads {reads}"
        yield f"head: {last or 'the model'} ({type(head).__name__}); outputs {tuple(output.shape[1:])}"


def _dependence(model: nn.Module, sample: SampleSpec) -> Iterator[str]:
    """Yield lines on causes that make gradients depend on other samples or random numbers, in the clients' mode.

    Each line states the consequence for attackers.
    """
    if is_stochastic(model):
        yield (
            "random numbers in training (such as dropout): attackers do not know the random numbers and attack without "
            "them; compare with dropout p=0"
        )
        draw_nothing(model)
    inputs = sample.noise(3, torch.Generator().manual_seed(0))
    with torch.no_grad():
        one, other = (copy_model(model)(inputs[[0, mate]])[0] for mate in (1, 2))
    if not torch.allclose(one, other, atol=1e-6):
        yield (
            "norms: outputs depend on the other samples of a batch (batch statistics): audit the batch sizes that you "
            "train with"
        )
    if moves_buffers(model, sample):
        yield (
            "norms: clients send batch statistics with the update: attackers see them, and defences of the update do "
            "not change them"
        )
