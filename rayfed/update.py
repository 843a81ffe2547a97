"""Messages between roles: from clients to the server, and from the server to an attacker.

An `Update` is all that leaves a client. An `Observation` is all that an attacker ever sees.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from rayfed import hidden
from rayfed.errors import UserError
from rayfed.samples import SampleSpec

Named = dict[str, Tensor]
"""Tensors by the name that they have in the model's `named_parameters()` (or `named_buffers()`)."""


def digest_of(tensors: Named) -> bytes:
    """Return the SHA-256 of the tensors' names, types, shapes and values, in their order."""
    digest = sha256()
    for name, tensor in tensors.items():
        digest.update(repr((name, str(tensor.dtype), tuple(tensor.shape))).encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.digest()


def list_nonfinite(tensors: Mapping[str, Tensor], own: Mapping[str, Tensor] | None = None) -> list[str]:
    """Return the names of tensors with NaN or infinite values.

    A tensor that equals the model's `own` of that name is left out: masks of attention hold minus infinity by design.
    """
    known = own or {}
    return [
        name
        for name, tensor in tensors.items()
        if not (tensor.isfinite().all() or (name in known and torch.equal(tensor, known[name].to(tensor))))
    ]


@dataclass(frozen=True)
class Update:
    """One client's message to the server after one round.

    `tensors` points the way a gradient does: the server *subtracts* it. Under FedSGD it is the gradient of the
    mean loss of one batch, under FedAvg the weights received minus the weights after local training.
    """

    client: int
    round: int
    tensors: Named
    """Parameter name -> tensor of the parameter's shape."""
    buffers: Named
    """Floating-point buffers (batch-norm statistics) as they are after local training: values, not differences.
    Frozen parameters, which stay as they were sent, are not among them."""
    samples: int
    """Number of samples the client trained on: its weight in a sample-weighted mean."""
    loss: float
    """Mean training loss over the round's local steps, for the clients' table; the server learns it only from a rule
    that says so (`Aggregation.reveals`)."""
    bits: int = 32
    """Bits of one sent value: 32 for floats, fewer after a quantiser. A defence that changes the values sets it."""

    @property
    def sent_bytes(self) -> int:
        """Bytes on the wire, with each tensor in its shortest form.

        That is dense, or its non-zero values behind a bit mask, or behind a list of their indices. Buffers travel as
        dense 32-bit floats; headers and the quantiser's one scale a tensor are not counted.
        """
        total_bits = 32 * sum(b.numel() for b in self.buffers.values())
        return (total_bits + sum(map(self._bits_of, self.tensors.values())) + 7) // 8

    def _bits_of(self, tensor: Tensor) -> int:
        size, kept = tensor.numel(), int(torch.count_nonzero(tensor))
        index = (size - 1).bit_length()
        sparse = self.bits * kept + min(size, index * kept)
        if self.bits == 1 and kept < size:  # one bit tells two signs apart, and no zero beside them
            return sparse
        return min(self.bits * size, sparse)


class Share(NamedTuple):
    """One client's part in a sum of encrypted updates."""

    client: int
    weight: int
    """The client's weight in the mean."""
    before: int
    """The whole number by which the client multiplied its update before it encrypted it."""
    after: int
    """The whole number by which the encrypted update has been multiplied since."""
    nonce: bytes
    """Random bytes, by which no two updates that a client encrypts have the mask of their tags in common."""


Shapes = tuple[tuple[str, tuple[int, ...]], ...]


class Sealed(Protocol):
    """A client's update as a channel hides it."""

    unreadable: ClassVar[str]
    """Why nothing is to be found in it, in words."""


@dataclass(frozen=True)
class Encrypted:
    """Sum of encrypted updates of one or more clients: all that the server has of them."""

    unreadable: ClassVar[str] = hidden.ENCRYPTED

    round: int
    shares: tuple[Share, ...]
    tensors: Shapes
    """Names and shapes of the parameters; their values come first among those encrypted."""
    buffers: Shapes
    parameters: Any
    """Public parameters of the encryption (`rayfed.crypto.encryptor.Encryptor`): the same in all that are added."""
    public: bytes
    """The public key, where adding needs one."""
    ciphertexts: tuple[bytes, ...]
    tag: int
    """Tag by which who opens the sum knows that it is one of what clients encrypted (`rayfed.crypto.tags`)."""

    @property
    def sent_bytes(self) -> int:
        """Bytes on the wire: ciphertexts, tag and nonces, as for an `Update` without headers."""
        return sum(map(len, self.ciphertexts)) + 16 + sum(len(share.nonce) for share in self.shares)


@dataclass(frozen=True, eq=False)
class Masked:
    """Sum of some clients' weighted updates as integers under masks, which only the sum of all removes."""

    unreadable: ClassVar[str] = hidden.MASKED

    round: int
    clients: tuple[int, ...]
    """Clients whose vectors are in the sum; nobody where all have dropped out."""
    tensors: Shapes
    """Names and shapes of the parameters, as in `Encrypted`."""
    buffers: Shapes
    vector: np.ndarray
    """The sum, (D + 1,) uint64, modulo 2^64; the last number is the sum of the weights."""

    @property
    def sent_bytes(self) -> int:
        """Bytes on the wire; a client that drops out sends none."""
        return self.vector.nbytes if self.clients else 0


@dataclass(frozen=True)
class LocalTraining:
    """Settings of the local steps behind an update, which the server knows; by default one gradient (FedSGD)."""

    steps: int = 1
    batch_size: int | None = None
    """Samples of one step; None: all of the client's."""
    lr: float = 1.0
    momentum: float = 0.0
    weight_decay: float = 0.0
    """Share of the weights that is added to the gradient of every step."""
    clip_norm: float | None = None
    """Largest norm of a step's gradient, before weight decay and momentum; None: any."""

    @property
    def scale(self) -> float:
        """Ratio of the update to the mean gradient, if the gradient were the same in all steps.

        With momentum m it counts 1 + m + ... + m^(k-1) times in step k.
        """
        m = self.momentum
        return self.lr * sum((1 - m**k) / (1 - m) for k in range(1, self.steps + 1))

    def check(self) -> None:
        """Raise `UserError` for settings with which no step can be repeated, such as a learning rate of 0 or NaN."""
        expected = {
            "steps": (_is_count(self.steps), "a whole number from 1"),
            "batch_size": (self.batch_size is None or _is_count(self.batch_size), "a whole number from 1, or None"),
            "lr": (_is_finite(self.lr) and self.lr > 0, "a finite number above 0"),
            "momentum": (_is_finite(self.momentum) and 0 <= self.momentum < 1, "a number from 0 to below 1"),
            "weight_decay": (_is_finite(self.weight_decay) and self.weight_decay >= 0, "a finite number from 0"),
            "clip_norm": (
                self.clip_norm is None or (_is_finite(self.clip_norm) and self.clip_norm > 0),
                "a finite number above 0, or None",
            ),
        }
        for name, (fits, needed) in expected.items():
            if not fits:
                raise UserError(f"LocalTraining: {name} is {getattr(self, name)!r}; expected {needed}")


def _is_count(value: Any) -> bool:
    return isinstance(value, int | np.integer) and bool(value >= 1)


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float | np.number) and bool(np.isfinite(value))


@dataclass(frozen=True)
class Mixtures:
    """Updates of a round, or mixtures of them, that a rule sends to every client for scoring."""

    updates: dict[int, Named]
    """Client -> its update, or the mixture that stands for it."""
    buffers: dict[int, Named]
    shares: Tensor
    """(N, N) float64, the share of each client's update (a column) in what stands for each (a row), in the order of
    `updates`."""


_PART = 64
"""Most rows and columns of a layer that are looked at for how an update was scaled."""
_ALIKE = 0.05
"""Largest relative difference of eigenvalues that are one but for rounding."""


@dataclass(frozen=True)
class Observation:
    """All that an attacker sees of one victim; never the truth."""

    victim: int
    round: int
    weights: Named
    """The parameters that the client was sent."""
    buffers: Named
    """The model's buffers, and its parameters that are frozen, as the client was sent them; and what the attacker takes
    for the client's private part, where it has one (`rayfed.models.private`)."""
    update: Named
    """The update that the client returned, after its defences, or what stood for it where clients were shown it; empty
    where it was hidden by a channel, or nothing was shown."""
    scale: float
    """`update / scale` estimates the mean gradient: 1 for FedSGD, lr * local steps for FedAvg."""
    batch_size: int
    """Number of samples behind the update (clients report it for weighted averaging)."""
    sample: SampleSpec
    """Description of the samples behind the update: images, texts or records, and how large."""
    classes: int
    """Number of classes, or of outputs where labels are numbers."""
    labels: Tensor | None = None
    """Labels (batch_size,) int64, or numbers (batch_size, classes), or classes of places (batch_size, ...) int64, only
    where they are granted."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Other knowledge that the threat model grants (`rayfed.client.grants`), by the names that its grants declare:
    `public` is a pair of inputs (M, *shape) and labels (M,), `defence` (`Named`) are bool masks, and so on. What would
    tell of the values of a hidden update is a function of it (`Update`) until it is opened."""
    has_numbers: bool = False
    """Whether labels are numbers, one for each output of the model, rather than classes."""
    has_places: bool = False
    """Whether labels are a class for each place of a sample, such as its tokens or pixels."""
    local: LocalTraining = LocalTraining()
    """The local steps that the client was told to take."""
    returned_buffers: Named = field(default_factory=dict)
    """The floating-point buffers that the client returned beside its update: no defence has changed them."""
    sealed: Sealed | None = None
    """The client's update and buffers as its channel hides them, in place of both."""
    shown: Mixtures | None = None
    """All that clients were shown in the round, for anyone who may unmix it."""
    earlier: tuple[Observation, ...] = ()
    """What was seen of the victim in earlier rounds, at the weights that it was sent then, on the same samples."""

    @property
    def places(self) -> tuple[int, ...]:
        """Shape of what has one label: (L,) or (H, W) where labels are a class for each place, else ()."""
        return self.sample.shape[-2:] if self.has_places else ()

    def to(self, device: torch.device) -> Observation:
        """Return a copy on another device; `extra` and `shown`, which observations may share, are not moved."""

        def moved(tensors: Named) -> Named:
            return {name: t.to(device) for name, t in tensors.items()}

        return replace(
            self,
            weights=moved(self.weights),
            buffers=moved(self.buffers),
            update=moved(self.update),
            returned_buffers=moved(self.returned_buffers),
            labels=None if self.labels is None else self.labels.to(device),
            earlier=tuple(one.to(device) for one in self.earlier),
        )

    @property
    def gradient(self) -> Named:
        """The attacker's estimate of the mean gradient at `weights`; shorter where it was clipped (`local`)."""
        return {name: tensor / self.scale for name, tensor in self.undecayed.items()}

    @property
    def undecayed(self) -> Named:
        """The update with the effect of weight decay removed, exact after one step.

        Where a defence has left nothing there is nothing to take off, and of an update that it scaled (a clip) as much
        as it left, if a linear layer tells.
        """
        if not (decay := self.scale * self.local.weight_decay):
            return self.update
        decay *= self._left_of(decay)
        return {n: torch.where(t == 0, t, t - decay * self.weights[n]) for n, t in self.update.items()}

    def _left_of(self, decay: float) -> float:
        """Return the factor by which the update was scaled after a decay was added; 1 if no linear layer shows it.

        A square part of such a layer's update is c (D + G), D the decay's and G the gradient's, whose rank is that of
        the samples. So c is an eigenvalue of the update over D, as many times as the part has more rows than that.
        """
        rank = self.batch_size * self.local.steps
        for name, tensor in self.update.items():
            size = min(*tensor.shape, _PART) if tensor.ndim == 2 else 0
            if size <= 2 * rank:
                continue
            sent, added = (t[:size, :size].double() for t in (tensor, decay * self.weights[name]))
            solved, failed = torch.linalg.solve_ex(added, sent)
            if failed or not solved.isfinite().all():
                continue
            values = torch.linalg.eigvals(solved)
            factor = values.real.median()
            if factor > 0 and int(((values - factor).abs() <= _ALIKE * factor).sum()) >= size - rank:
                return float(factor)
        return 1.0

    @property
    def step(self) -> Named:
        """The mean local step behind the update divided by the learning rate: the gradient with its weight decay."""
        return {name: tensor / self.scale for name, tensor in self.update.items()}
