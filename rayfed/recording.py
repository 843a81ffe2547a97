"""Recordings of existing federations: what a server sees of each update, in an open format.

`docs/existing-federations.md` describes it: a folder with `recording.json`, and for every update a row in
`index/*.parquet`, the state that the client was sent in `sent/`, what it returned in `returned/`, and, only where
that is asked for, its samples in `truth/`, as safetensors. Each file is written once and whole, so clients in processes
of their own may write to one folder.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
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

from rayfed.arrays import Arrays, by_name, is_counter, to_tensor
from rayfed.attacks.given import observe
from rayfed.errors import DataError, UserError
from rayfed.models.wrappers import bare_name, unwrapped
from rayfed.number_types import check_model
from rayfed.recording_checks import LOCAL, build_loss, check_normalisation, check_round, check_shape, count_outputs
from rayfed.samples import Pixels
from rayfed.targets import to_targets
from rayfed.update import LocalTraining, Named, digest_of

FORMAT, VERSION = "rayfed-recording", 1
_HEADER = "recording.json"
_SLACK = 1e-3
"""How far a pixel may be out of [0, 1] for the rounding of a normalisation that is undone."""
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
"""What a client returned: its state dict after local steps, or a gradient."""


@dataclass(frozen=True)
class Header:
    """Properties that all updates of a recording share."""

    model: str
    """Name of the model's class, for people."""
    shape: tuple[int, int, int]
    """Shape (C, H, W) of an image."""
    classes: int
    mean: tuple[float, ...] | None = None
    """What images in [0, 1] are normalised by before the model, per channel; None: nothing."""
    std: tuple[float, ...] | None = None
    loss: Mapping[str, Any] | None = None
    """The loss that clients minimise, as a scenario's section `loss`; None: cross entropy."""

    @property
    def sample(self) -> Pixels:
        """Description of the samples."""
        return Pixels(*self.shape)


class Recorder:
    """Writer of a recording; as a context manager it warns at its end if nothing was recorded.

    A server records the gradients that clients return. It has no samples, only their number:

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
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        classes: int | None = None,
        shape: Sequence[int] | None = None,
        loss: str | Mapping[str, Any] | None = None,
    ) -> None:
        """Start or continue a recording in a folder; see `rayfed.record`."""
        check_model(model, type(model).__name__)
        self._model, self._folder, self._local, self._truth = model, Path(folder), local, truth
        self._mean, self._std = check_normalisation(mean, std)
        self._classes, self._shape = classes, None if shape is None else check_shape(shape)
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
            warnings.warn(f"{self._folder}: nothing was recorded, for round() was never called", stacklevel=2)

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
        """Record one client's answer in one round.

        `sent` is the state dict that the client was sent, `update` the one that it returned after the `local` steps, or
        where there are none the gradient of its mean loss. Both may be NumPy arrays, by name or in a list in the order
        of `model.state_dict()`. `batch` are the inputs (N, C, H, W), as the model took them, and labels of all samples
        behind it: their number and shape are written, they themselves only as the truth.
        A server, which has none, gives their number, and their `shape` to the recorder.
        If `round` and `client` are not given, another state sent begins another round, and clients are counted.

        Raises `UserError` for tensors that are not the model's or not finite, for images out of range, for labels that
        the loss does not take, and for an update that cannot be replayed with others of its round.
        """
        local, (samples, images, labels) = local or self._local, self._behind(batch)
        sent = self._bare(by_name("sent", sent, self._model))
        update = self._bare(by_name("gradient" if local is None else "returned", update, self._model))
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
        """Return tensors under the names of the model without its wrappers."""
        return {bare_name(name, self._names): tensor for name, tensor in tensors.items()}

    def _numbered(self, digest: bytes, round: int | None, client: int | None) -> tuple[int, int]:
        last, number, clients = self._last
        if round is None:
            round = number if digest == last else number + 1
        if client is None:
            client = clients if round == number else 0
        for name, value in (("round", round), ("client", client)):
            if not isinstance(value, int | np.integer) or value < 0:
                raise UserError(f"record: {name} is {value!r}; expected a whole number from 0")
        return int(round), int(client)

    def _behind(self, batch: tuple[Any, Any] | int) -> tuple[int, Tensor | None, Any]:
        """Return the number of samples behind an update, and images and labels if they are given."""
        if isinstance(batch, int | np.integer):
            if self._shape is None or self._truth or batch < 1:
                raise UserError(
                    f"record: a batch of {batch} without its samples needs record(..., shape=(C, H, W)), and has no "
                    f"truth: give images and labels"
                )
            return int(batch), None, None
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise UserError(
                f"record: a batch is {type(batch).__name__}; expected (inputs, labels), or the number of samples"
            )
        images = self._images(to_tensor("inputs", batch[0]))
        known = self._header.shape if self._header else self._shape
        if known not in (None, tuple(images.shape[1:])):
            raise UserError(
                f"record: images are {tuple(images.shape[1:])}; expected {known}, as `shape` or those before"
            )
        return len(images), images, batch[1]

    def _images(self, inputs: Tensor) -> Tensor:
        """Return images in [0, 1] with the normalisation undone; raises `UserError` for inputs that are not images."""
        if inputs.ndim != 4 or not inputs.is_floating_point() or not inputs.numel():
            raise UserError(
                f"record: inputs are {inputs.dtype} {tuple(inputs.shape)}, and images (N, C, H, W) of floats are what "
                f"can be recorded: of texts and rows give attacks what they need by rayfed.attacks.given.observe"
            )
        images = inputs.detach().cpu().float()
        if self._mean is not None and self._std is not None:
            self._check_channels(images.shape[1])
            mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (self._mean, self._std))
            images = images * std + mean
        low, high = float(images.min()), float(images.max())
        if not (low >= -_SLACK and high <= 1 + _SLACK):  # NaN is out of range, too
            raise UserError(
                f"record: images are from {low:.3g} to {high:.3g}, and attacks look for some in [0, 1]: give the mean "
                f"and std by which your transform normalises, record(..., mean=[...], std=[...])"
            )
        return images.clamp(0, 1)

    def _check_channels(self, channels: int) -> None:
        if self._mean is not None and not len(self._mean) == len(self._std or ()) == channels:
            raise UserError(f"record: mean and std need {channels} values each, one a channel")

    def _check(self, header: Header, sent: Named, update: Named, samples: int, local: LocalTraining | None) -> None:
        """Check one update, with warnings on the first one."""
        known = self._header is not None or not (self._folder / _HEADER).exists()
        if not known and (found := Recording(self._folder).header) != header:
            raise UserError(f"{self._folder} has a recording of something else ({found}): record to another folder")
        if local is not None:
            local.check()
        if local and local.batch_size and local.steps * local.batch_size < samples:
            raise UserError(
                f"record: {local.steps} steps of {local.batch_size} samples use no more than "
                f"{local.steps * local.batch_size}, and the batch has {samples}: give those that were used"
            )
        answer: dict[str, Any] = {"gradient": update} if local is None else {"returned": update, "local": local}
        given = observe(self._model, sent, header.sample, header.classes, samples, **answer)
        for remark in given.remarks if self._header is None else ():
            warnings.warn(f"record: {remark}", stacklevel=3)

    def _new_header(self, images: Tensor | None) -> Header:
        """Return the properties of the recording, after a forward pass of the model."""
        shape = self._shape if images is None else check_shape(images.shape[1:])
        assert shape is not None
        self._check_channels(shape[0])
        with unwrapped(self._model) as bare:
            classes = count_outputs(bare, torch.zeros(1, *shape), self._classes)
        return Header(self._kind, shape, classes, self._mean, self._std, self._loss_section)

    def _others(self, round: int, client: int) -> list[dict[str, Any]]:
        """Return the rows of the other clients of a round, those of earlier processes too."""
        if round not in self._rounds:
            paths = (self._folder / "index").glob(f"round-{round:05d}-client-*.parquet")
            rows = [row for path in paths for row in _read_rows([path]).to_pylist()]
            self._rounds[round] = {row["client"]: row for row in rows}
        return [row for other, row in self._rounds[round].items() if other != client]

    def _begin(self, header: Header) -> None:
        """Write the header, unless the folder has it."""
        if self._header is not None:
            return
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # an update may be as private as its samples
        except OSError as error:
            raise UserError(f"record: cannot make the folder {self._folder}: {error.strerror}") from error
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
    """One client's answer in one round, as it was recorded."""

    folder: Path
    round: int
    client: int
    samples: int
    """Number of samples behind it."""
    kind: Kind
    local: LocalTraining
    """The local steps behind a state; one gradient otherwise."""
    files: Mapping[str, str | None]

    @property
    def name(self) -> str:
        """Short description of the update."""
        return f"round {self.round}, client {self.client}"

    @property
    def row(self) -> dict[str, Any]:
        """Columns of the index that updates of one round share, with the number of samples."""
        return {"kind": self.kind, "samples": self.samples, **asdict(self.local), **self.files}

    @property
    def sent(self) -> Named:
        """The state dict that the client was sent."""
        return self._read("sent")

    @property
    def returned(self) -> Named:
        """The state dict, or the gradient, that the client returned."""
        return self._read("returned")

    @property
    def has_truth(self) -> bool:
        """Whether the samples behind the update were recorded, too."""
        return self.files["truth"] is not None

    @property
    def truth(self) -> tuple[Tensor, Tensor]:
        """Images (N, C, H, W) in [0, 1] and labels behind the update: classes (N,) int64, or numbers (N, k) float32."""
        found = self._read("truth")
        return found["inputs"], found["labels"]

    @property
    def answer(self) -> dict[str, Any]:
        """Keyword arguments of `rayfed.attacks.given.observe` for this update."""
        return (
            {"gradient": self.returned} if self.kind == "gradient" else {"returned": self.returned, "local": self.local}
        )

    def _read(self, what: str) -> Named:
        path = self.folder / str(self.files[what])
        try:
            found: Named = load_file(path)
        except (OSError, SafetensorError) as error:
            raise DataError(f"{path} of {self.name} cannot be read: {error}; restore it from a copy") from error
        return found


@dataclass(frozen=True)
class Recording:
    """A recording in a folder; raises `DataError` if there is none, or one of another version."""

    folder: Path

    @cached_property
    def header(self) -> Header:
        """Properties that all updates share."""
        path = self.folder / _HEADER
        try:
            read = json.loads(path.read_text())
        except OSError as error:
            raise DataError(
                f"{self.folder} is no recording (no {_HEADER}): name a folder that rayfed.record wrote"
            ) from error
        except ValueError as error:
            raise DataError(f"{path} is damaged: {error}") from error
        if not isinstance(read, dict) or (read.pop("format", None), read.pop("version", None)) != (FORMAT, VERSION):
            raise DataError(f"{path}: not a recording of version {VERSION}, which this rayfed reads")
        try:
            lists = {key: tuple(value) for key, value in read.items() if isinstance(value, list)}
            return Header(**read | lists)
        except TypeError as error:
            raise DataError(f"{path} is damaged: {error}") from error

    @cached_property
    def updates(self) -> list[RecordedUpdate]:
        """All updates, by round and client."""
        _ = self.header
        paths = sorted((self.folder / "index").glob("*.parquet"))
        if not paths:
            raise DataError(f"{self.folder} has no updates: nothing was recorded")
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
        """The rounds that were recorded."""
        return list(dict.fromkeys(update.round for update in self.updates))

    def of_round(self, round: int) -> list[RecordedUpdate]:
        """Return the updates of a round; raises `UserError` if there are none, or if their initial weights differ."""
        found = [update for update in self.updates if update.round == round]
        if not found:
            raise UserError(f"{self.folder} has no round {round}, but {', '.join(map(str, self.rounds))}")
        if len({update.files["sent"] for update in found}) > 1:
            raise UserError(f"{self.folder}: clients of round {round} were sent different states: number rounds apart")
        return found


def _packed(tensors: Mapping[str, Tensor]) -> bytes:
    packed: bytes = save({name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()})
    return packed


def _read_rows(paths: Iterable[Path]) -> pa.Table:
    """Return the rows of some files of an index; raises `DataError` for one that cannot be read."""
    parts = []
    for path in paths:
        try:
            parts.append(pq.read_table(path).cast(_ROWS))
        except (OSError, ValueError, pa.ArrowException) as error:
            raise DataError(f"{path} cannot be read: {error}") from error
    return pa.concat_tables(parts)
