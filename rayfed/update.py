"""Define the messages from clients to the server (`Update`), and what an attacker sees of them (`Observation`).

Clients send nothing except updates, and attackers see nothing except observations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from rayfed.core.reasons import Reason
from rayfed.errors import UserError
from rayfed.samples import SampleSpec

Named = dict[str, Tensor]
"""Tensors by their names in the model's `named_parameters()` or `named_buffers()`."""


def digest_of(tensors: Named) -> bytes:
    """Return the SHA-256 of the tensors' names, types, shapes and values, in the dictionary's order."""
    digest = sha256()
    for name, tensor in tensors.items():
        digest.update(repr((name, str(tensor.dtype), tuple(tensor.shape))).encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.digest()


def list_nonfinite(tensors: Mapping[str, Tensor], own: Mapping[str, Tensor] | None = None) -> list[str]:
    """Return the names of the tensors that contain NaN or infinite values.

    A tensor that equals the model's `own` is skipped, because attention masks contain minus infinity by design.
    """
    known = own or {}
    return [
        name
        for name, tensor in tensors.items()
        if not (tensor.isfinite().all() or (name in known and torch.equal(tensor, known[name].to(tensor))))
    ]


@dataclass(frozen=True)
class Update:
    """Message of one client to the server in one round: its update, buffers and number of samples.

    The server *subtracts* `tensors`, as it would a gradient. With FedSGD they are the gradient of the mean loss of a
    batch. With FedAvg they are the received weights minus the weights after local training.
    """

    client: int
    round: int
    tensors: Named
    """Parameter name -> tensor of the parameter's shape."""
    buffers: Named
    """Floating-point buffers, such as batch-norm statistics, after local training. These are values, not differences.
    Frozen parameters are not included."""
    samples: int
    """Number of samples that the client trained on, which is its weight in a sample-weighted mean."""
    loss: float
    """Mean training loss over the round's local steps, for the table of clients. Only rules that declare it
    (`Aggregation.reveals`) show it to the server."""
    bits: int = 32
    """Bits per sent value: 32 for floats, fewer after a quantiser. Set by the defence that changes the values."""

    @property
    def sent_bytes(self) -> int:
        """Return the size of the client's message in bytes, with each tensor in its shortest encoding.

        A tensor is sent dense, or as its non-zero values with a bit mask or with a list of indices. Buffers are sent as
        dense 32-bit floats. Headers and a quantiser's scale per tensor are not counted.
        """
        total_bits = 32 * sum(b.numel() for b in self.buffers.values())
        return (total_bits + sum(map(self._bits_of, self.tensors.values())) + 7) // 8

    def _bits_of(self, tensor: Tensor) -> int:
        size, kept = tensor.numel(), int(torch.count_nonzero(tensor))
        index = (size - 1).bit_length()
        sparse = self.bits * kept + min(size, index * kept)
        if self.bits == 1 and kept < size:  # one bit encodes the sign, but not zero
            return sparse
        return min(self.bits * size, sparse)


class Share(NamedTuple):
    """Description of one client's part in a sum of encrypted updates."""

    client: int
    weight: int
    """The client's weight in the mean."""
    before: int
    """Integer by which the client multiplied its update before encryption."""
    after: int
    """Integer by which the encrypted update was multiplied after encryption."""
    nonce: bytes
    """Random bytes that make the masks of the tags differ between a client's updates."""


Shapes = tuple[tuple[str, tuple[int, ...]], ...]


class Sealed(Protocol):
    """Protocol of hidden updates: a client's update as a secure channel encrypts or masks it."""

    unreadable: ClassVar[str]
    """Reason why an attacker cannot read the update, in words."""


@dataclass(frozen=True)
class Encrypted:
    """Sum of the encrypted updates of one or more clients, as the server sees it."""

    reason: ClassVar[Reason] = Reason.ENCRYPTED
    unreadable: ClassVar[str] = "the update is encrypted: the attacker sees a ciphertext, not a gradient"

    round: int
    shares: tuple[Share, ...]
    tensors: Shapes
    """Names and shapes of the parameters. Their values are encrypted before those of the buffers."""
    buffers: Shapes
    parameters: Any
    """Public parameters of the encryption (`rayfed.crypto.encryptor.Encryptor`). Equal for all updates of a sum."""
    public: bytes
    """The public key, if additions need it."""
    ciphertexts: tuple[bytes, ...]
    tag: int
    """Tag with which the receiver verifies that the sum consists of the clients' updates (`rayfed.crypto.tags`)."""

    @property
    def sent_bytes(self) -> int:
        """Return the size of ciphertexts, tag and nonces in bytes, without headers."""
        return sum(map(len, self.ciphertexts)) + 16 + sum(len(share.nonce) for share in self.shares)


@dataclass(frozen=True, eq=False)
class Masked:
    """Sum of some clients' weighted, masked updates as integers. The masks cancel only in the sum of all clients."""

    reason: ClassVar[Reason] = Reason.MASKED
    unreadable: ClassVar[str] = "the update is masked: without the other clients' shares it is uniform noise"

    round: int
    clients: tuple[int, ...]
    """Clients whose vectors are in the sum. Empty if all have dropped out."""
    tensors: Shapes
    """Names and shapes of the parameters, as in `Encrypted`."""
    buffers: Shapes
    vector: np.ndarray
    """The sum modulo 2^64, (D + 1,) uint64. The last number is the sum of the weights."""

    @property
    def sent_bytes(self) -> int:
        """Return the size of the masked message in bytes; 0 for a client that drops out."""
        return self.vector.nbytes if self.clients else 0


@dataclass(frozen=True)
class LocalTraining:
    """Settings of a client's local training, which the server knows. Default: one gradient (FedSGD)."""

    steps: int = 1
    batch_size: int | None = None
    """Samples per step. None: all samples of the client."""
    lr: float = 1.0
    momentum: float = 0.0
    weight_decay: float = 0.0
    """Share of the weights that is added to the gradient in every step."""
    clip_norm: float | None = None
    """Maximum norm of a step's gradient, before weight decay and momentum. None: not clipped."""

    @property
    def scale(self) -> float:
        """Return the ratio of the update to the mean gradient, if the gradients of all local steps are equal.

        With momentum m, step k counts the gradient 1 + m + ... + m^(k-1) times.
        """
        m = self.momentum
        return self.lr * sum((1 - m**k) / (1 - m) for k in range(1, self.steps + 1))

    def check(self) -> None:
        """Raise `UserError` for invalid training settings, such as a learning rate of 0 or NaN."""
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
    """Client -> its update, or the mixture that replaces it."""
    buffers: dict[int, Named]
    shares: Tensor
    """Shares (N, N) float64 of the clients' updates (columns) in the mixtures (rows), in the order of `updates`."""


_PART = 64
"""Maximum number of rows and columns of a layer from which the scale of an update is estimated."""
_ALIKE = 0.05
"""Maximum relative difference of eigenvalues that count as equal."""


@dataclass(frozen=True)
class Observation:
    """Everything that an attacker sees of one victim (attacked client), without the true samples."""

    victim: int
    round: int
    weights: Named
    """The parameters that the client was sent."""
    buffers: Named
    """The model's buffers and frozen parameters that the client was sent, and the attacker's substitute for the
    client's private part, if the model has one (`rayfed.models.private`)."""
    update: Named
    """The client's update after its defences, or the mixture that other clients were shown. Empty if a channel hides
    the update, or if nothing was shown."""
    scale: float
    """Factor such that `update / scale` estimates the mean gradient: 1 for FedSGD, lr * local steps for FedAvg."""
    batch_size: int
    """Number of samples of the update, which clients report for weighted averaging."""
    sample: SampleSpec
    """Kind and size of the samples: images, texts or records."""
    classes: int
    """Number of classes, or of outputs if labels are numbers."""
    labels: Tensor | None = None
    """Labels (batch_size,) int64, numbers (batch_size, classes), or classes of positions (batch_size, ...) int64. None
    unless the threat model grants them."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Other knowledge that the threat model grants, by the names in `rayfed.threat_model.grants`. For example, `public`
    is a pair of inputs (M, *shape) and labels (M,), and `defence` are bool masks by name. Knowledge that depends on the
    values of a hidden update is a function of the `Update`, to be called when it is opened."""
    has_numbers: bool = False
    """Whether labels are numbers, one per output of the model, rather than classes."""
    has_places: bool = False
    """Whether labels are a class for each position of a sample, such as its tokens or pixels."""
    local: LocalTraining = LocalTraining()
    """The local steps that the server asked the client to run."""
    returned_buffers: Named = field(default_factory=dict)
    """The floating-point buffers that the client returned. Defences do not change them."""
    sealed: Sealed | None = None
    """The hidden update and buffers, if the client uses a channel."""
    shown: Mixtures | None = None
    """All mixtures that clients were shown in the round, for attackers that may separate them."""
    earlier: tuple[Observation, ...] = ()
    """Observations of the same victim and samples in earlier rounds."""

    @property
    def places(self) -> tuple[int, ...]:
        """Return the shape (L,) or (H, W) of a sample's labels if each position has a label, or else ()."""
        return self.sample.shape[-2:] if self.has_places else ()

    def to(self, device: torch.device) -> Observation:
        """Return a copy on another device. `extra` and `shown` stay on their device: observations may share them."""

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
        """Return the attacker's estimate of the mean gradient at `weights`. Clipped gradients are not rescaled."""
        return {name: tensor / self.scale for name, tensor in self.undecayed.items()}

    @property
    def undecayed(self) -> Named:
        """Return the update without the effect of weight decay. The result is exact for one local step.

        Values that a defence set to zero are not changed. If a defence scaled the update, such as by clipping, the
        decay is scaled too, if a linear layer shows by how much.
        """
        if not (decay := self.scale * self.local.weight_decay):
            return self.update
        decay *= self._left_of(decay)
        return {n: torch.where(t == 0, t, t - decay * self.weights[n]) for n, t in self.update.items()}

    def _left_of(self, decay: float) -> float:
        """Estimate the factor by which the update was scaled after weight decay; 1 if no linear layer shows it.

        A square part of a linear layer's update is c (D + G), with the decay D and the gradient G, whose rank is at
        most the number of samples. So c is a repeated eigenvalue of D^-1 times the update.
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
        """Return the mean local step divided by the learning rate, which is the gradient including weight decay."""
        return {name: tensor / self.scale for name, tensor in self.update.items()}
