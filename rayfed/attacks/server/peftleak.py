"""PEFTLeak: a malicious server recovers image patches from the adapter gradients of a vision transformer.

Clients train bottleneck adapters, u + W' act(W u + b), in a frozen transformer. The server chooses the weights of both.
In all blocks but the last, attention and MLP pass each token on unchanged. The input of an adapter is then an affine
image of

    x = (E (patch - 1/2), tag, R s_p, R, 0, 0)    for the patch at position p:

The rows of E are the lowest-frequency coefficients of an orthonormal cosine transform, as many as fit. A norm scales
and shifts each token by unknown amounts. The known entries (R s_p, R, 0), with codes |s_p| = 1, reveal both and allow
an exact inversion. An MLP passes tokens on with W2 = (I, -I) and W1 = W2^T, because act(t) - act(-t) = t for ReLU, GELU
and SiLU. The attention of the first block, with zero queries, computes the mean over an image's tokens and writes eight
of its entries into `tag`. All patches of an image share this tag, which groups them.

The rows l of W for position p all measure its brightness, h(x) = E_1 x + l (R s_p x_s - R x_R), which is below all
thresholds at other positions. The rows differ only in their thresholds c_1 < c_2 < ... All columns of W' are equal. Let
g_i be the derivative of the loss with respect to a row's activation. Row l then gets sum g_i u_i (weight) and sum g_i
(bias) over the images with h > c_l. The difference of rows l and l + 1 contains bin l only: weight over bias is the
token if the bin holds one token. The outputs of a norm all have one length and their means are shorter, which reveals
bins with several tokens.

Source: Sami et al. 2025, "Gradient Inversion Attacks on Parameter-Efficient Fine-Tuning" (PEFTLeak), section 4. There,
large biases carry tokens through an MLP, positions are so large that norms hardly change a token, and clustering groups
the patches of an image. Codes, the exact inversion of norms and equal tags are ours.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import pi
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from torch.func import functional_call

from rayfed.attacks.base import NotApplicable, Reconstruction, not_applicable
from rayfed.attacks.forward_probe import without_tracking
from rayfed.attacks.groups import in_groups
from rayfed.attacks.inference.labels import filled, with_labels
from rayfed.models.private import private_names, without
from rayfed.models.trained import blocks_of
from rayfed.registry import component
from rayfed.update import Named, Observation

_PHOTOGRAPHS = (0.47, 0.23)
"""Mean and standard deviation of patch brightness in photographs, such as the 8 x 8 patches of CIFAR-10."""
_SAMPLES = 128
"""Maximum number of images from which bins are set."""
_TAGS, _CODES = 8, 16
"""Number of token entries for the tag, and the minimum for position codes."""
_PREFIX = 4
"""Maximum number of tokens before the patches."""
_STEEP = 1000.0
"""Factor on the rows before GELU, so that it is curved only within about a hundredth of a bin."""
_EXACT = 1e-3
"""Maximum relative error of an adapter's input against the token that the server intends."""
_SURE = 3e-5
"""Maximum error of known entries and length for a patch that counts as recovered. The patch is then the only one in its
bin, or its pixels differ by at most about 0.01 from the others there."""
_PLAUSIBLE = 0.3
"""Maximum error of known entries and length for a patch that is used at all."""
_SAME_TAG = 0.02
"""Maximum distance of two tags of one image, relative to the spread of tags, in addition to the noise."""

_NO_EMBEDDING = "the model is not a vision transformer: no convolution cuts the image into non-overlapping patches"
_NO_BLOCKS = "the model has fewer than two blocks: the attack needs adapters in a block before the last one"
_NO_ADAPTERS = (
    "no adapter with a bias is trained before the last block: the attack needs a linear layer to fewer values, ReLU or "
    "GELU, and a linear layer back. LoRA adapters have no bias and no activation"
)
_NO_POSITIONS = "the model has no position embedding with one vector for each patch"
_TOLD = "{} of {} patches recovered with certainty"
_NO_LENGTH = "some adapters have no norm layer before them, so patches that are mixed in one bin cannot be identified"
_UNTOUCHED = (
    "no adapter receives patches with the weights that the client was sent: the server must tamper with the frozen "
    "model and the adapters (see `MaliciousServer`), but the attack does not support this model's attention, MLPs or "
    "private parts"
)
_OTHER_PRECISION = "a model with weights of {} does not accept the float32 images of clients"
_COARSE = "weights of {} are too coarse: the input of an adapter differs from the patch by a relative error above {}"


class _Adapter(NamedTuple):
    """Paths of an adapter's two linear layers, and its number of rows."""

    down: str
    up: str
    rows: int


class _Seen(NamedTuple):
    """Input of an adapter."""

    tokens: Tensor
    """(N, tokens, D)."""
    smooth: bool
    """Whether the activation is GELU rather than ReLU."""


class _Aim(NamedTuple):
    """Rows of one adapter that measure one position."""

    adapter: int
    position: int
    rows: slice
    first: int
    """Index of the bin that the first row opens."""
    last: bool
    """Whether the last row opens a bin, too, or only closes the previous one."""


@dataclass(frozen=True)
class _Transformer:
    """Parts of a vision transformer, identified by their types and shapes."""

    model: nn.Module
    embed: str
    positions: str
    adapters: tuple[_Adapter, ...]
    blocks: tuple[str, ...]
    shape: tuple[int, ...]
    grid: tuple[int, int]

    @classmethod
    def found_in(cls, model: nn.Module, trained: Sequence[str], shape: tuple[int, ...]) -> list[_Transformer]:
        """Return the parts for each convolution that may cut patches; raise `NotApplicable` if a part is missing."""
        found, reason = list[_Transformer](), NotApplicable(_NO_EMBEDDING, inherent=True)
        for embed, conv in model.named_modules():
            if _cuts(conv, shape):
                try:
                    found.append(cls._of(model, embed, trained, shape))
                except NotApplicable as missing:
                    reason = missing
        if not found:
            raise reason
        return found

    @classmethod
    def _of(cls, model: nn.Module, embed: str, trained: Sequence[str], shape: tuple[int, ...]) -> _Transformer:
        conv = model.get_submodule(embed)
        assert isinstance(conv, nn.Conv2d)
        blocks = tuple(blocks_of(model))
        if len(blocks) < 2:
            raise NotApplicable(_NO_BLOCKS, inherent=True)
        grid = (shape[1] // conv.kernel_size[0], shape[2] // conv.kernel_size[1])
        private = private_names(model)
        inside = tuple(
            adapter
            for block in blocks[:-1]
            for adapter in _adapters(model, block, conv.out_channels)
            if f"{adapter.down}.bias" in trained and f"{adapter.up}.weight" not in private
        )
        if not inside:
            raise NotApplicable(_NO_ADAPTERS, inherent=True)
        linear = {f"{name}.weight" for name, m in model.named_modules() if isinstance(m, nn.Linear)}
        wanted = {(grid[0] * grid[1] + more) * conv.out_channels for more in range(_PREFIX + 1)}
        outside = ((n, t) for n, t in _state(model).items() if n not in linear and not n.startswith(blocks))
        positions = next((n for n, t in outside if t.ndim > 1 and t.numel() in wanted and _is_row(t, conv)), None)
        if positions is None:
            raise NotApplicable(_NO_POSITIONS, inherent=True)
        if conv.out_channels < 2 * (_TAGS + _CODES):
            raise NotApplicable(f"tokens of {conv.out_channels} values are too narrow to hold patches and codes", True)
        return cls(model, embed, positions, inside, blocks, shape, grid)

    @property
    def width(self) -> int:
        """Return the number of entries of a token."""
        return int(self._conv.out_channels)

    @property
    def places(self) -> int:
        """Return the number of patches of an image."""
        return self.grid[0] * self.grid[1]

    @property
    def radius(self) -> float:
        """Return the length R of a position code: twice the length of the brightest patch."""
        return float(self.basis.shape[1] ** 0.5)

    @property
    def known(self) -> slice:
        """Return the slice of a token's entries whose values the server knows."""
        return slice(len(self.basis) + _TAGS, self.width - 1)

    @property
    def tags(self) -> slice:
        """Return the slice of a token's entries that hold the tag of the token's image."""
        return slice(len(self.basis), len(self.basis) + _TAGS)

    @property
    def _conv(self) -> nn.Conv2d:
        conv = self.model.get_submodule(self.embed)
        assert isinstance(conv, nn.Conv2d)
        return conv

    @cached_property
    def basis(self) -> Tensor:
        """Return the patch transform E, (K, C * height * width) float64, with the lowest frequencies first."""
        sizes = (self.shape[0], *self._conv.kernel_size)
        waves = [_cosines(size) for size in sizes]
        rows = torch.einsum("ax,by,cz->abcxyz", *waves).flatten(0, 2).flatten(1)
        colour, down, across = (index.flatten() for index in torch.meshgrid(*map(torch.arange, sizes), indexing="ij"))
        order = ((down + across) * sizes[0] + colour).argsort(stable=True)
        return rows[order[: self.width - _TAGS - _CODES - 3]]

    @cached_property
    def codes(self) -> Tensor:
        """Return the known entries of each position's token, (positions + 1, S) float64.

        The last row is for tokens before the patches.
        """
        size = self.known.stop - self.known.start - 2
        drawn = torch.randn(self.places + 1, size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        fixed = torch.tensor([1.0, 0.0]).double().expand(len(drawn), -1)
        return self.radius * torch.cat([F.normalize(drawn), fixed], 1)

    def measure(self, position: int) -> Tensor:
        """Return an adapter row (D,) that measures the brightness of the patch at one position.

        At all other positions, the row gives values below those of all images at `position`.
        """
        units = self.codes[:, :-2] / self.radius
        alike = float((units @ units.T).fill_diagonal_(-1).max())
        row = torch.zeros(self.width, dtype=torch.float64)
        row[0] = 1
        row[self.known][:-2] = units[position]
        row[self.known][-2] = -1
        row[self.known] *= 1.5 / (1 - alike)
        row[self.known.stop - 1] = -row.sum()  # makes the row insensitive to the shift of a norm
        return row

    @torch.no_grad()
    def look(self, state: Named, images: Tensor) -> list[_Seen]:
        """Return the input of each adapter for images (N, *shape) at the weights `state`."""
        copy = without_tracking(self.model)
        seen: dict[str, list[Tensor]] = defaultdict(list)

        def keep(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
            def hook(_: nn.Module, entered: tuple[Tensor, ...], left: Tensor) -> None:
                seen[name].append(entered[0])
                seen[f"{name} left"].append(left)

            return hook

        for path in (path for adapter in self.adapters for path in (adapter.down, adapter.up)):
            copy.get_submodule(path).register_forward_hook(keep(path))
        _run(copy, state, images)
        return [self._entering(adapter, seen, images) for adapter in self.adapters]

    def _entering(self, adapter: _Adapter, seen: Mapping[str, list[Tensor]], images: Tensor) -> _Seen:
        none = _Seen(images.new_zeros(len(images), 0, self.width), smooth=False)
        if not {adapter.down, adapter.up} <= seen.keys():
            return none
        tokens, measured, active = (
            torch.cat(seen[name]) for name in (adapter.down, f"{adapter.down} left", adapter.up)
        )
        if tokens.ndim != 3 or len(tokens) != len(images) or measured.shape != active.shape:
            return none
        smooth = not torch.equal(measured.relu(), active)
        return (
            none
            if smooth and not torch.allclose(F.gelu(measured), active, atol=1e-3)
            else _Seen(tokens.double(), smooth)
        )

    def plain(self, tokens: Tensor, positions: Tensor | slice) -> tuple[Tensor, Tensor]:
        """Undo a norm layer's scale and shift of tokens (..., P, D); return the tokens and relative errors (..., P)."""
        known = self.codes[positions].to(tokens)
        entries, centred = tokens[..., self.known], known - known.mean(-1, keepdim=True)
        scale = (entries * centred).sum(-1, keepdim=True) / centred.square().sum(-1, keepdim=True)
        shift = entries.mean(-1, keepdim=True) - scale * known.mean(-1, keepdim=True)
        plain = (tokens - shift) / scale
        error = (plain[..., self.known] - known).norm(dim=-1) / known.norm(dim=-1)
        return plain, torch.where(scale[..., 0] > 0, error, torch.inf)

    def shown(self, state: Named) -> dict[int, bool]:
        """Return the indices of adapters that receive patches, and whether the inputs of each have equal length."""
        drawn = torch.rand((4, *self.shape), generator=torch.Generator().manual_seed(0))
        images = drawn.to(_device(state))
        patches = self.cut(images).double()
        wanted = (patches - 0.5) @ self.basis.T.to(patches)
        good = {}
        for number, (tokens, _) in enumerate(self.look(state, images)):
            if tokens.shape[1] < self.places:
                continue
            plain, error = self.plain(tokens[:, -self.places :], slice(self.places))
            tags = plain[..., self.tags]
            apart = (tags - tags[:, :1]).norm() / (tags - tags.mean(0)).norm()
            missed = (plain[..., : len(self.basis)] - wanted).norm() / wanted.norm()
            if all(bool(amiss < _EXACT) for amiss in (error.max(), missed, apart)):
                lengths = tokens.square().sum(-1) / self.width
                good[number] = bool((lengths - 1).abs().max() < _EXACT)
        return good

    def cut(self, images: Tensor) -> Tensor:
        """Cut images (N, *shape) into patches, (N, positions, C * height * width)."""
        return F.unfold(images, self._conv.kernel_size, stride=self._conv.kernel_size).transpose(1, 2)

    def joined(self, patches: Tensor) -> Tensor:
        """Join patches to images (N, *shape), with NaN at borders that no patch covers."""
        size = (self.grid[0] * self._conv.kernel_size[0], self.grid[1] * self._conv.kernel_size[1])
        images = F.fold(patches.transpose(1, 2), size, self._conv.kernel_size, stride=self._conv.kernel_size)
        return F.pad(images, (0, self.shape[2] - size[1], 0, self.shape[1] - size[0]), value=torch.nan)

    def aims(self, adapters: Sequence[int]) -> list[_Aim]:
        """Assign rows of the given adapters to patch positions."""
        shares: dict[int, list[tuple[int, slice]]] = {}
        groups: dict[int, list[int]] = {}
        for turn in range(max(len(adapters), self.places)):
            groups.setdefault(adapters[turn % len(adapters)], []).append(turn % self.places)
        for adapter, positions in groups.items():
            each = max(1, self.adapters[adapter].rows // len(positions))
            for place, position in enumerate(positions[: self.adapters[adapter].rows]):
                shares.setdefault(position, []).append((adapter, slice(place * each, (place + 1) * each)))
        aims = []
        for position, parts in sorted(shares.items()):
            first = 0
            for adapter, rows in parts:
                aims.append(_Aim(adapter, position, rows, first, (adapter, rows) == parts[-1]))
                first += rows.stop - rows.start - 1
        return aims


@component
class PeftLeak:
    """Reconstruct image patches from adapter gradients, after sending the victims tampered weights (active attack).

    The attack needs a trainable bottleneck adapter in at least one block before the last. Clients must also accept the
    frozen part of the model from this server. The result's message counts the patches recovered with certainty. Missing
    patches get the mean colour of the image's other patches. Labels are recovered from the gradient.
    """

    place_labels: ClassVar[str] = "unneeded"

    gain: Annotated[float, Field(gt=0)] = 1e6
    """Factor by which an adapter's first layer is scaled down and its second layer up. It raises the first layer's
    gradient above noise and in clipped gradients, and changes nothing else. It has no effect with GELU."""
    brightness: tuple[Annotated[float, Field(gt=0, lt=1)], Annotated[float, Field(gt=0)]] | None = None
    """Mean and standard deviation of the mean pixel of patches. Default: with `knowledge: [public]`, bins of equal
    share of the public images' patches, and otherwise 0.47 and 0.23 (photographs)."""

    def tamper(
        self,
        model: nn.Module,
        weights: Named,
        buffers: Named,
        image_shape: tuple[int, ...],
        extra: Mapping[str, Any],
        generator: torch.Generator,
    ) -> tuple[nn.Module, Named, Named]:
        """Return the model with tampered weights, frozen and trainable; unchanged if the model is not supported."""
        unsent = without(_state(model), weights | buffers)
        kept = {name: tensor.detach().to(_device(weights)) for name, tensor in unsent.items()}
        try:
            for found in _Transformer.found_in(model, list(weights), image_shape):
                state = _transparent(found, kept | weights | buffers) | kept  # the server may not write `kept`
                if shown := found.shown(state):
                    self._aim(found, state, found.aims(list(shown)), self._samples(found, extra))
                    return model, {name: state[name] for name in weights}, {name: state[name] for name in buffers}
        except NotApplicable:
            pass
        return model, weights, buffers

    def reconstruct(
        self, observations: Sequence[Observation], model: nn.Module, generators: Sequence[torch.Generator]
    ) -> list[Reconstruction]:
        """Return one reconstruction for each observation (see `Attack`)."""
        first = observations[0]
        try:
            if first.sample.modality != "pixels":
                raise NotApplicable(_NO_EMBEDDING, inherent=True)
            state = first.weights | first.buffers
            every = _Transformer.found_in(model, list(first.weights), first.sample.shape)
            found, shown = next(((one, seen) for one in every if (seen := one.shown(state))), (every[0], {}))
            if not shown:
                raise NotApplicable(_untouched(state[f"{found.embed}.weight"].dtype))
        except NotApplicable as reason:
            return [not_applicable(observation, str(reason), reason.inherent) for observation in observations]
        labelled = [filled(observation) for observation in with_labels(observations, model)]
        return in_groups(lambda group, _: [_reconstruction(found, shown, o) for o in group], labelled, generators)

    def _samples(self, found: _Transformer, extra: Mapping[str, Any]) -> Tensor:
        """Return images (n, *shape) whose patches have the brightness assumed of the clients' patches."""
        if "public" in extra and self.brightness is None:
            images: Tensor = extra["public"][0]
            return images[:: -(-len(images) // _SAMPLES)]
        mean, deviation = self.brightness or _PHOTOGRAPHS
        levels: Tensor = mean + deviation * torch.special.ndtri((torch.arange(_SAMPLES) + 0.5) / _SAMPLES)
        return levels.view(-1, 1, 1, 1).expand(-1, *found.shape).float()

    def _aim(self, found: _Transformer, state: Named, aims: Sequence[_Aim], samples: Tensor) -> None:
        """Write rows, thresholds and output weights of the adapters into the weights."""
        ends = torch.stack([samples.new_zeros(found.shape), samples.new_ones(found.shape)])
        like = state[found.positions]
        seen = found.look(state, torch.cat([ends, samples]).to(like.device))
        bins: dict[int, int] = {}
        for aim in aims:
            bins[aim.position] = aim.first + aim.rows.stop - aim.rows.start
        for aim in aims:
            tokens, smooth = seen[aim.adapter]
            row, count = found.measure(aim.position).to(tokens), bins[aim.position]
            measured = tokens @ row
            own = measured.shape[1] - found.places + aim.position
            values = measured[:, own]
            others = torch.cat([measured[:, :own], measured[:, own + 1 :]], 1)
            shares = torch.arange(1, count, device=tokens.device, dtype=tokens.dtype) / count
            lowest = (values.min() + others.max()) / 2 if others.numel() else values.min() - values.std()
            edges = torch.cat([lowest[None], values[2:].quantile(shares)])
            slope = 1 / (count * values[2:].std())
            steep = _STEEP if smooth else 1 / self.gain
            adapter, size = found.adapters[aim.adapter], aim.rows.stop - aim.rows.start
            state[f"{adapter.down}.weight"][aim.rows] = (steep * slope * row).to(like)
            state[f"{adapter.down}.bias"][aim.rows] = (-steep * slope * edges[aim.first : aim.first + size]).to(like)
            state[f"{adapter.up}.weight"][-1, aim.rows] = 1 / steep


def _untouched(dtype: torch.dtype) -> str:
    """Return the reason why no adapter receives patches with weights of this precision."""
    return _UNTOUCHED if dtype.itemsize >= 4 else _COARSE.format(str(dtype).split(".")[-1], _EXACT)


def _transparent(found: _Transformer, state: Named) -> Named:
    """Return weights with which blocks pass the server's tokens on unchanged, and adapters add nothing."""
    state = {name: tensor.detach().clone() for name, tensor in state.items()}
    conv, basis = found.model.get_submodule(found.embed), found.basis
    assert isinstance(conv, nn.Conv2d)
    low, scale = _entering(found, state)
    kernel = (basis.view(len(basis), *conv.weight.shape[1:]) / scale.view(-1, 1, 1)).flatten(1)
    grey = (low / scale + 0.5).repeat_interleave(basis.shape[1] // len(low))
    rows = torch.zeros(found.places + 1, found.width, dtype=torch.float64)
    rows[:, found.known] = found.codes
    rows[:-1, : len(basis)] = -basis @ grey
    table = {name: tensor for name, tensor in state.items() if not name.startswith(found.blocks)}
    for name in (n for n, t in table.items() if t.ndim == 3 and n != found.positions and _is_row(t, conv)):
        if table[name].numel() <= _PREFIX * found.width:  # tokens before the patches, perhaps without a position
            state[name] = torch.zeros_like(state[name]) + rows[-1].to(state[name])
    places = state[found.positions].view(-1, found.width)
    places[:] = rows[-1].to(places)
    places[-found.places :] = rows[:-1].to(places)
    state[f"{found.embed}.weight"] = torch.zeros_like(conv.weight)
    state[f"{found.embed}.weight"].flatten(1)[: len(basis)] = kernel.to(conv.weight)
    if conv.bias is not None:
        state[f"{found.embed}.bias"] = torch.zeros_like(conv.bias)
    for block in found.blocks[:-1]:
        _pass_on(found, state, block)
    for adapter in found.adapters:
        state[f"{adapter.down}.bias"] += 1  # ReLU and GELU differ at 1, and the next layer multiplies by 0
    _tag(found, state)
    return {name: tensor.detach().to(_device(state)) for name, tensor in state.items()}


def _pass_on(found: _Transformer, state: Named, block: str) -> None:
    """Set the weights of a block: attention adds nothing, norms only normalise, and MLPs return their input."""
    module = found.model.get_submodule(block)
    for name, parameter in module.named_parameters():
        scale = parameter.ndim < 2 and not name.endswith("bias")
        state[f"{block}.{name}"] = torch.full_like(state[f"{block}.{name}"], float(scale))
    for (name, one), (after, other) in pairwise(_linear(module)):
        if (one.out_features, one.in_features) == (other.in_features, other.out_features) and (
            one.in_features == found.width and one.out_features >= 2 * found.width
        ):
            both = torch.cat([torch.eye(found.width), -torch.eye(found.width)])
            state[f"{block}.{name}.weight"][: 2 * found.width] = both.to(state[f"{block}.{name}.weight"])
            state[f"{block}.{after}.weight"][:, : 2 * found.width] = both.T.to(state[f"{block}.{after}.weight"])


def _tag(found: _Transformer, state: Named) -> None:
    """Set the first block's attention so that it writes the mean of an image's tokens into their tags."""
    block, width = found.blocks[0], found.width
    sizes = {n: tuple(p.shape) for n, p in found.model.get_submodule(block).named_parameters() if p.ndim == 2}
    square = [name for name, size in sizes.items() if size == (width, width)]
    fused = [name for name, size in sizes.items() if size == (3 * width, width)]
    if not square or (not fused and len(square) < 4):
        return
    value, first, out = (fused[0], 2 * width, square[0]) if fused else (square[2], 0, square[3])
    for entry in range(_TAGS):
        state[f"{block}.{value}"][first + entry, entry] = 1
        state[f"{block}.{out}"][found.tags.start + entry, entry] = 1


def _entering(found: _Transformer, state: Named) -> tuple[Tensor, Tensor]:
    """Return shift and scale (C,) of a pixel before the embedding, for models that normalise images."""
    copy, seen = without_tracking(found.model), list[Tensor]()
    copy.get_submodule(found.embed).register_forward_pre_hook(lambda _, entered: seen.append(entered[0]))
    ends = torch.stack([torch.zeros(found.shape), torch.ones(found.shape)])
    with torch.no_grad():
        _run(copy, state, ends.to(_device(state)))
    if not seen:  # the model does not use the convolution
        return torch.zeros(found.shape[0]).double(), torch.ones(found.shape[0]).double()
    low, high = seen[0].double().cpu().flatten(2).mean(2)
    return low, high - low


def _device(state: Named) -> torch.device:
    return next(iter(state.values())).device


def _run(model: nn.Module, state: Named, images: Tensor) -> None:
    model.to(images.device)
    own = _state(model)
    others = {str(t.dtype).split(".")[-1] for t in state.values() if t.is_floating_point()} - {"float32"}
    for part in images.split(128):
        try:
            functional_call(model, {name: tensor for name, tensor in state.items() if name in own}, (part,))
        except RuntimeError as error:
            if not others:
                raise
            raise NotApplicable(_OTHER_PRECISION.format(" and ".join(sorted(others)))) from error


def _reconstruction(found: _Transformer, shown: Mapping[int, bool], observation: Observation) -> Reconstruction:
    assert observation.labels is not None
    labels, count = observation.labels.cpu(), observation.batch_size
    patches, places, tags, errors, noise = _patches(found, shown, observation)
    message = _TOLD.format(int((errors < _SURE).sum()), count * found.places)
    if count > 1 and not all(shown.values()):
        message = _NO_LENGTH
    images = torch.full((count, found.places, found.basis.shape[1]), torch.nan, dtype=torch.float64)
    groups = [_best(places)] if count == 1 else _together(places, tags, errors, noise)
    for number, members in enumerate(groups[:count]):
        images[number, places[members]] = patches[members]
    if images.isnan().all():
        shape = (count, *found.shape)
        return Reconstruction(images=torch.full(shape, 0.5), labels=labels, status="diverged", message=message)
    joined = found.joined(images)
    colour = joined.flatten(2).nanmean(2)[..., None, None].nan_to_num(0.5)
    joined = torch.where(joined.isnan(), colour, joined)
    return Reconstruction(images=joined.clamp(0, 1).float(), labels=labels, message=message)


def _patches(
    found: _Transformer, shown: Mapping[int, bool], observation: Observation
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the patches in the bins (n, pixels), with positions, tags, errors and noise per entry.

    Patches with the smallest error come first. The error is that of the known entries, and of the length if norms give
    all tokens one length.
    """
    parts, sent = [], observation.undecayed
    for aim in found.aims(list(shown)):
        adapter, rows = found.adapters[aim.adapter], aim.rows
        weight, sums = (sent[f"{adapter.down}.{kind}"][rows].double().cpu() for kind in ("weight", "bias"))
        weight, sums = (torch.cat([t, torch.zeros_like(t[:1])]) for t in (weight, sums))
        tokens = ((weight[:-1] - weight[1:]) / (sums[:-1] - sums[1:])[:, None])[: None if aim.last else -1]
        plain, error = found.plain(tokens[:, None], torch.tensor([aim.position]))
        plain, error = plain[:, 0], error[:, 0]
        off = (tokens.square().sum(1) / found.width - 1).abs() if shown[aim.adapter] else torch.zeros(len(tokens))
        spread = error * found.radius * (2 / (found.known.stop - found.known.start)) ** 0.5
        places = torch.full((len(tokens),), aim.position)
        parts.append((plain, places, torch.maximum(error, off.to(error)), spread))
    plain, places, errors, noise = (torch.cat(every) for every in zip(*parts, strict=True))
    order = errors.nan_to_num(torch.inf).argsort(stable=True)
    order = order[(errors[order] < _PLAUSIBLE) & plain[order].isfinite().all(1)]
    plain, places, errors, noise = (t[order] for t in (plain, places, errors, noise))
    return plain[:, : len(found.basis)] @ found.basis + 0.5, places, plain[:, found.tags], errors, noise


def _best(places: Tensor) -> list[int]:
    """Return the patch with the smallest error at each position, for a batch of one image."""
    first: dict[int, int] = {}
    for patch, place in enumerate(places.tolist()):
        first.setdefault(place, patch)
    return list(first.values())


def _together(places: Tensor, tags: Tensor, errors: Tensor, noise: Tensor) -> list[list[int]]:
    """Return groups of patches with equal tags, at most one patch for each position, smallest errors first.

    Larger groups come first. Groups of equal size are ordered by the error of their first patch.
    """
    groups: list[list[int]] = []
    spread = float((tags - tags.median(0).values).norm(dim=1).median()) if len(tags) else 0.0
    for patch, place in enumerate(places.tolist()):
        near = sorted((float((tags[patch] - tags[group[0]]).norm()), n) for n, group in enumerate(groups))
        for away, number in near:
            group = groups[number]
            explained = 2 * _TAGS**0.5 * float(noise[patch] + noise[group[0]])
            if away < _SAME_TAG * spread + explained and place not in places[group].tolist():
                group.append(patch)
                break
        else:
            groups.append([patch])
    return sorted(groups, key=lambda group: (-len(group), float(errors[group[0]])))


def _cuts(module: nn.Module, shape: tuple[int, ...]) -> bool:
    """Return whether a module is a convolution that cuts images of this shape into non-overlapping patches."""
    return (
        isinstance(module, nn.Conv2d)
        and len(shape) == 3
        and module.in_channels == shape[0]
        and module.kernel_size == module.stride
        and min(module.kernel_size) > 1
        and module.groups == 1
        and module.padding in ((0, 0), "valid")
        and all(size >= kernel for size, kernel in zip(shape[1:], module.kernel_size, strict=True))
    )


def _adapters(model: nn.Module, block: str, width: int) -> list[_Adapter]:
    """Return a block's pairs of linear layers, to fewer values and back. The first of a pair has a bias."""
    return [
        _Adapter(f"{block}.{name}", f"{block}.{after}", one.out_features)
        for (name, one), (after, other) in pairwise(_linear(model.get_submodule(block)))
        if one.bias is not None
        and one.out_features < width
        and (one.in_features, one.out_features) == (width, other.in_features)
        and other.out_features == width
    ]


def _linear(module: nn.Module) -> list[tuple[str, nn.Linear]]:
    return [(name, part) for name, part in module.named_modules() if isinstance(part, nn.Linear)]


def _is_row(tensor: Tensor, conv: nn.Module) -> bool:
    return tensor.is_floating_point() and tensor.shape[-1] == conv.out_channels


def _state(model: nn.Module) -> Named:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _cosines(size: int) -> Tensor:
    """Return the orthonormal cosine transform (size, size) float64, one frequency in each row."""
    places = torch.arange(size, dtype=torch.float64)
    waves: Tensor = torch.cos(pi / size * (places[None] + 0.5) * places[:, None]) * (2 / size) ** 0.5
    waves[0] /= 2**0.5
    return waves
