"""Record the updates of an existing federation in an open format, and read recordings.

A recording is a folder with `recording.json` and, for every update, a row in `index/*.parquet`. Safetensors files hold
the state that the client was sent (`sent/`), its update (`returned/`) and on request its samples (`truth/`). Each file
is written once and atomically, so several processes may write to one folder. See `docs/existing-federations.md`.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn

from rayfed.attacks.external_update import observe
from rayfed.core.arrays import Arrays, is_counter, name_arrays, to_tensor
from rayfed.core.number_types import check_model
from rayfed.core.recording_checks import (
    LOCAL,
    build_loss,
    check_image_shape,
    check_normalisation,
    check_round,
    count_outputs,
)
from rayfed.core.targets import to_targets
from rayfed.errors import DataError, UserError
from rayfed.models.wrappers import bare_name, unwrapped
from rayfed.samples import Pixels
from rayfed.update import LocalTraining, Named, digest_of

FORMAT, VERSION = "rayfed-recording", 1
_HEADER = "recording.json"
_SLACK = 1e-3
"""Distance by which a pixel may be outside [0, 1] because of rounding, after its normalisation is undone."""
_ROWS = pa.schema(
    [
        pa.field("round", pa.int64(), nullable=False),
        pa.field("client", pa.int64(), nullable=False),
        pa.field("samples", pa.int64(), nullable=False),
        pa.field("kind", pa.string(), nullable=False),
        pa.field("steps", pa.int64(), nullable=False),
        pa.field("batch_size", pa.int64()),
        pa.field("lr", pa.float64(), nullable=False),
        pa.field("momentum", pa.float64(), nullable=False),
        pa.field("weight_decay", pa.float64(), nullable=False),
        pa.field("clip_norm", pa.float64()),
        pa.field("sent", pa.string(), nullable=False),
        pa.field("returned", pa.string(), nullable=False),
        pa.field("truth", pa.string()),
    ]
)
Kind = Literal["state", "gradient"]
"""Form of a client's update: its state dict after local steps, or a gradient."""


@dataclass(frozen=True)
class Header:
    """Properties shared by all updates of a recording."""

    model: str
    """Name of the model's class, for information."""
    shape: tuple[int, int, int]
    """Shape (C, H, W) of an image."""
    classes: int
    mean: tuple[float, ...] | None = None
    """Mean per channel with which images in [0, 1] are normalised for the model. None: not normalised."""
    std: tuple[float, ...] | None = None
    loss: Mapping[str, Any] | None = None
    """The loss that clients minimise, as in a scenario's section `loss`. None: cross entropy."""

    @property
    def sample(self) -> Pixels:
        """Return the kind and shape of the recorded samples, which are images."""
        return Pixels(*self.shape)


class Recorder:
    """Writer of a recording's updates. As a context manager, it warns at the end if nothing was recorded.

    A server records the gradients that clients return. It knows only the number of samples:

    >>> import tempfile
    >>> from pathlib import Path
    >>> import torch
    >>> from rayfed.recording import Recorder, Recording
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    >>> torch.nn.functional.cross_entropy(model(torch.rand(4, 1, 8, 8)), torch.tensor([3, 1, 4, 1])).backward()
    >>> gradient = {name: weight.grad for name, weight in model.named_parameters()}
    >>> folder = Path(tempfile.mkdtemp())
    >>> with Recorder(model, folder, shape=(1, 8, 8)) as recorder:
    ...     recorder.round(model.state_dict(), gradient, 4)
    >>> Recording(folder).rounds
    [0]
    """

    def __init__(
        self,
        model: nn.Module,
        folder: str | os.PathLike[str],
        local: LocalTraining | None = None,
        *,
        truth: bool = False,
        normalise: Any = None,
        classes: int | None = None,
        shape: Sequence[int] | None = None,
        loss: str | Mapping[str, Any] | None = None,
    ) -> None:
        """Start a recording in a folder, or continue the folder's recording; see `rayfed.record` for the arguments."""
        check_model(model, type(model).__name__)
        self._model, self._folder, self._local, self._truth = model, Path(folder), local, truth
        self._normalise = check_normalisation(normalise)
        self._classes, self._shape = classes, None if shape is None else check_image_shape(shape)
        self._header: Header | None = None
        self._loss_section: Mapping[str, Any] | None = {"name": loss} if isinstance(loss, str) else loss
        self._loss = build_loss(self._loss_section)
        self._last: tuple[bytes, int, int] = b"", -1, 0
        self._rounds: dict[int, dict[int, dict[str, Any]]] = {}
        """Rows of the rounds in the folder, by round and client."""
        with unwrapped(model) as bare:
            self._kind, self._names = type(bare).__name__, frozenset(bare.state_dict())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and self._header is None:
            warnings.warn(f"{self._folder}: nothing was recorded, because round() was never called", stacklevel=2)

    def round(
        self,
        sent: Arrays,
        update: Arrays,
        batch: tuple[Any, Any] | int,
        *,
        round: int | None = None,
        client: int | None = None,
        local: LocalTraining | None = None,
    ) -> None:
        """Record the update that one client returned in one round.

        `sent` is the state dict that the client was sent. `update` is the state dict after the `local` steps or, if
        `local` is None, the gradient of the client's mean loss. Both may be NumPy arrays, by name or in a list in the
        order of `model.state_dict()`.

        `batch` is a pair of all inputs (N, C, H, W), as given to the model, and labels. They are written only with
        `truth=True`. A server gives the number of samples instead.

        If `round` is None, a new state in `sent` starts a new round. If `client` is None, clients are counted.

        Raises `UserError` for tensors that do not fit the model or are not finite, for images out of range, for labels
        that do not fit the loss, and for an update that cannot be replayed with the others of its round.
        """
        local, (samples, images, labels) = local or self._local, self._behind(batch)
        sent = self._bare(name_arrays("sent", sent, self._model))
        update = self._bare(name_arrays("gradient" if local is None else "returned", update, self._model))
        digest = digest_of({name: tensor for name, tensor in sent.items() if not is_counter(name)})
        number, own = self._numbered(digest, round, client)
        kind: Kind = "gradient" if local is None else "state"
        header = self._header or self._new_header(images)
        self._check(header, sent, update, samples, local)
        name = f"round-{number:05d}-client-{own:05d}"
        files = {"sent": f"sent/{digest.hex()[:16]}.safetensors", "returned": f"returned/{name}.safetensors"}
        truth: Named = {}
        if self._truth and images is not None:
            truth = {"inputs": images, "labels": to_targets(labels, self._loss, samples, header.classes)}
            files["truth"] = f"truth/{name}.safetensors"
        row = {"round": number, "client": own, "samples": samples, "kind": kind, **asdict(local or LocalTraining())}
        row |= {"truth": None, **files}
        check_round([*self._others(number, own), row], f"record: round {number}")
        self._begin(header)
        if not (self._folder / files["sent"]).exists():
            self._write(files["sent"], _packed(sent))
        self._write(files["returned"], _packed(update))
        if truth:
            self._write(files["truth"], _packed(truth))
        sink = pa.BufferOutputStream()
        pq.write_table(pa.Table.from_pylist([row], schema=_ROWS), sink)
        self._write(f"index/{name}.parquet", sink.getvalue().to_pybytes())
        self._rounds[number][own] = row
        self._last = digest, number, own + 1

    def _bare(self, tensors: Named) -> Named:
        """Rename tensors as in the model without its wrappers."""
        return {bare_name(name, self._names): tensor for name, tensor in tensors.items()}

    def _numbered(self, digest: bytes, round: int | None, client: int | None) -> tuple[int, int]:
        last, number, clients = self._last
        if round is None:
            round = number if digest == last else number + 1
        if client is None:
            client = clients if round == number else 0
        for name, value in (("round", round), ("client", client)):
            if not isinstance(value, int | np.integer) or value < 0:
                raise UserError(f"record: {name} is {value!r}; expected an integer of at least 0")
        return int(round), int(client)

    def _behind(self, batch: tuple[Any, Any] | int) -> tuple[int, Tensor | None, Any]:
        """Return the number of samples of an update, and its images and labels if they are given."""
        if isinstance(batch, int | np.integer):
            if self._shape is None or self._truth or batch < 1:
                raise UserError(
                    f"record: the batch is a number ({batch}): give record(..., shape=(C, H, W)) and a number of at "
                    f"least 1, or with truth=True images and labels"
                )
            return int(batch), None, None
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise UserError(
                f"record: the batch is a {type(batch).__name__}; expected (inputs, labels) or the number of samples"
            )
        images = self._images(to_tensor("inputs", batch[0]))
        known = self._header.shape if self._header else self._shape
        if known not in (None, tuple(images.shape[1:])):
            raise UserError(
                f"record: images have shape {tuple(images.shape[1:])}; expected {known}, as in `shape` or earlier calls"
            )
        return len(images), images, batch[1]

    def _images(self, inputs: Tensor) -> Tensor:
        """Undo the normalisation of inputs and return images in [0, 1]. Raises `UserError` for other inputs."""
        if inputs.ndim != 4 or not inputs.is_floating_point() or not inputs.numel():
            raise UserError(
                f"record: inputs are {inputs.dtype} {tuple(inputs.shape)}; expected images (N, C, H, W) of floats. "
                f"Texts and rows cannot be recorded: attack them with rayfed.attacks.external_update.observe"
            )
        images = inputs.detach().cpu().float()
        if self._normalise is not None:
            self._check_channels(images.shape[1])
            mean, std = (torch.tensor(v).view(-1, 1, 1) for v in (self._normalise.mean, self._normalise.std))
            images = images * std + mean
        low, high = float(images.min()), float(images.max())
        if not (low >= -_SLACK and high <= 1 + _SLACK):  # also true for NaN
            raise UserError(
                f"record: images have values from {low:.3g} to {high:.3g}; expected 0 to 1. Give the mean and std of "
                f"your transform, record(..., normalise=rayfed.Normalisation(mean=[...], std=[...]))"
            )
        return images.clamp(0, 1)

    def _check_channels(self, channels: int) -> None:
        if self._normalise and not len(self._normalise.mean) == len(self._normalise.std) == channels:
            raise UserError(f"record: mean and std need {channels} values each, one per channel")

    def _check(self, header: Header, sent: Named, update: Named, samples: int, local: LocalTraining | None) -> None:
        """Check one update. Remarks on the first one are warnings."""
        known = self._header is not None or not (self._folder / _HEADER).exists()
        if not known and (found := Recording(self._folder).header) != header:
            raise UserError(f"{self._folder} has another recording ({found}): record to another folder")
        if local is not None:
            local.check()
        if local and local.batch_size and local.steps * local.batch_size < samples:
            raise UserError(
                f"record: {local.steps} steps of {local.batch_size} samples use at most "
                f"{local.steps * local.batch_size} samples, but the batch has {samples}: give only the samples used"
            )
        answer: dict[str, Any] = {"gradient": update} if local is None else {"returned": update, "local": local}
        given = observe(self._model, sent, header.sample, header.classes, samples, **answer)
        for remark in given.remarks if self._header is None else ():
            warnings.warn(f"record: {remark}", stacklevel=3)

    def _new_header(self, images: Tensor | None) -> Header:
        """Return the recording's shared properties; runs a forward pass of the model."""
        shape = self._shape if images is None else check_image_shape(images.shape[1:])
        assert shape is not None
        self._check_channels(shape[0])
        with unwrapped(self._model) as bare:
            classes = count_outputs(bare, torch.zeros(1, *shape), self._classes)
        header = Header(self._kind, shape, classes, loss=self._loss_section)
        if self._normalise is None:
            return header
        return replace(header, mean=tuple(self._normalise.mean), std=tuple(self._normalise.std))

    def _others(self, round: int, client: int) -> list[dict[str, Any]]:
        """Return the rows of the other clients of a round, including those of other processes."""
        if round not in self._rounds:
            paths = (self._folder / "index").glob(f"round-{round:05d}-client-*.parquet")
            rows = [row for path in paths for row in _read_rows([path]).to_pylist()]
            self._rounds[round] = {row["client"]: row for row in rows}
        return [row for other, row in self._rounds[round].items() if other != client]

    def _begin(self, header: Header) -> None:
        """Write the header unless the folder has one."""
        if self._header is not None:
            return
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # updates may be as private as samples
        except OSError as error:
            raise UserError(
                f"record: cannot create the folder {self._folder}: {error.strerror}; choose another folder"
            ) from error
        written = {name: value for name, value in asdict(header).items() if name != "loss" or value is not None}
        text = json.dumps({"format": FORMAT, "version": VERSION, **written}, indent=2) + "\n"
        if not (self._folder / _HEADER).exists():
            self._write(_HEADER, text.encode())
        self._header = header

    def _write(self, name: str, data: bytes) -> None:
        path = self._folder / name
        path.parent.mkdir(exist_ok=True)
        partly = path.with_name(f".{path.name}.{os.getpid()}")
        partly.write_bytes(data)
        partly.replace(path)


@dataclass(frozen=True)
class RecordedUpdate:
    """One recorded update, from one client in one round."""

    folder: Path
    round: int
    client: int
    samples: int
    """Number of samples that the client trained on."""
    kind: Kind
    local: LocalTraining
    """The client's local steps; the default if it returned a gradient."""
    files: Mapping[str, str | None]

    @property
    def name(self) -> str:
        """Return the update's round and client in words, for messages."""
        return f"round {self.round}, client {self.client}"

    @property
    def row(self) -> dict[str, Any]:
        """Return the update's row of the recording's index, with the columns that `check_round` needs."""
        return {"kind": self.kind, "samples": self.samples, **asdict(self.local), **self.files}

    @property
    def sent(self) -> Named:
        """Read the state dict that the server sent to the client."""
        return self._read("sent")

    @property
    def returned(self) -> Named:
        """Read the state dict or gradient that the client returned."""
        return self._read("returned")

    @property
    def has_truth(self) -> bool:
        """Return whether the client's samples were recorded."""
        return self.files["truth"] is not None

    @property
    def truth(self) -> tuple[Tensor, Tensor]:
        """Read the client's true images (N, C, H, W) in [0, 1], and labels (N,) int64 or (N, k) float32."""
        found = self._read("truth")
        return found["inputs"], found["labels"]

    @property
    def answer(self) -> dict[str, Any]:
        """Return the recorded update as keyword arguments of `rayfed.attacks.external_update.observe`."""
        return (
            {"gradient": self.returned} if self.kind == "gradient" else {"returned": self.returned, "local": self.local}
        )

    def _read(self, what: str) -> Named:
        path = self.folder / str(self.files[what])
        try:
            found: Named = load_file(path)
        except (OSError, SafetensorError) as error:
            raise DataError(f"cannot read {path} of {self.name}: {error}; restore the file from a copy") from error
        return found


@dataclass(frozen=True)
class Recording:
    """Reader of a recording in a folder. Raises `DataError` if the folder has no recording of the supported version."""

    folder: Path

    @cached_property
    def header(self) -> Header:
        """Read the properties that all updates of the recording share."""
        path = self.folder / _HEADER
        try:
            read = json.loads(path.read_text())
        except OSError as error:
            raise DataError(
                f"{self.folder} is not a recording (no {_HEADER}): give a folder written by rayfed.record"
            ) from error
        except ValueError as error:
            raise DataError(f"{path} is damaged: {error}; restore the file from a copy") from error
        if not isinstance(read, dict) or (read.pop("format", None), read.pop("version", None)) != (FORMAT, VERSION):
            raise DataError(f"{path}: not a recording of version {VERSION}; record again, or change rayfed's version")
        try:
            lists = {key: tuple(value) for key, value in read.items() if isinstance(value, list)}
            return Header(**read | lists)
        except TypeError as error:
            raise DataError(f"{path} is damaged: {error}; restore the file from a copy") from error

    @cached_property
    def updates(self) -> list[RecordedUpdate]:
        """Return all recorded updates, ordered by round and client. Tensors are read later, when they are used."""
        _ = self.header
        paths = sorted((self.folder / "index").glob("*.parquet"))
        if not paths:
            raise DataError(f"{self.folder} contains no recorded updates; call the recorder's round() for every update")
        rows = _read_rows(paths).sort_by([("round", "ascending"), ("client", "ascending")]).to_pylist()
        return [
            RecordedUpdate(
                self.folder, row["round"], row["client"], row["samples"], row["kind"],
                LocalTraining(**{name: row[name] for name in LOCAL}),
                {name: row[name] for name in ("sent", "returned", "truth")},
            )
            for row in rows
        ]  # fmt: skip

    @property
    def rounds(self) -> list[int]:
        """Return the numbers of the recorded rounds, in ascending order."""
        return list(dict.fromkeys(update.round for update in self.updates))

    def of_round(self, round: int) -> list[RecordedUpdate]:
        """Return a round's updates. Raises `UserError` if there are none, or if clients were sent different states."""
        found = [update for update in self.updates if update.round == round]
        if not found:
            raise UserError(f"{self.folder} has no round {round}; choose one of {', '.join(map(str, self.rounds))}")
        if len({update.files["sent"] for update in found}) > 1:
            raise UserError(
                f"{self.folder}: the clients of round {round} were sent different states; record them as rounds with "
                f"different numbers"
            )
        return found


def _packed(tensors: Mapping[str, Tensor]) -> bytes:
    packed: bytes = save({name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()})
    return packed


def _read_rows(paths: Iterable[Path]) -> pa.Table:
    """Return the rows of the index files. Raises `DataError` for a file that cannot be read."""
    parts = []
    for path in paths:
        try:
            parts.append(pq.read_table(path).cast(_ROWS))
        except (OSError, ValueError, pa.ArrowException) as error:
            raise DataError(f"cannot read {path}: {error}; restore the file from a copy") from error
    return pa.concat_tables(parts)
