"""Loaded data sets, and the base class of components that load a data set.

Samples keep their stored form, such as uint8 images. They are converted to model inputs batch by batch
(`SampleSpec.tensor`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, NamedTuple, Protocol

import numpy as np
from pydantic import Field

from rayfed.core.objective import NO_TARGET
from rayfed.data.images import Encoded, decode_images, resize
from rayfed.errors import DataError
from rayfed.registry import component
from rayfed.samples import Pixels, SampleSpec, Tokens

_NAMED = 10
"""Maximum number of classes named in one line."""


class Images(Protocol):
    """Protocol of a data set's samples: an array in memory, or images in a file."""

    @property
    def dtype(self) -> np.dtype:
        """Return the NumPy type of the stored values."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the samples: (N, C, H, W) of images, or (N, L) of texts."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, rows: np.ndarray, /) -> np.ndarray:
        """Return the samples at these indices as an array in memory."""
        ...


def load_in_memory(images: Images) -> np.ndarray:
    """Return all samples of a split as an array in memory, in their stored form."""
    return images[np.arange(len(images))]


@dataclass(frozen=True, eq=False)
class Dataset:
    """Data set with a train and a test split; raises `DataError` if the splits are inconsistent."""

    train_images: Images
    """Training samples (N, C, H, W) uint8, or uint16 for images with more than 8 bits; (N, L) int64 for texts."""
    train_labels: np.ndarray
    """Training labels. Classes: (N,) int64, indices into `classes`. Words: (N, L) int64, one letter per entry, padded
    with 0. Numbers: (N, k) float32, one per output of the model. One class per position: see `has_places`."""
    test_images: Images
    """Test samples (M, ...) of the same shape."""
    test_labels: np.ndarray
    """Test labels (M,) or (M, L') int64, or (M, k) float32."""
    classes: tuple[str, ...]
    """Names of the classes, in the order of their labels. For words: the letters, after the blank. For numbers: the
    names of the outputs."""
    public_images: Images | None = None
    """Public samples (P, ...), which no client owns and everybody knows (see `with_public`)."""
    public_labels: np.ndarray | None = None
    """Public labels (P,) or (P, L) int64, or (P, k) float32."""
    sources: tuple[str, ...] = ()
    """Names of the sources of the training samples; empty if unknown."""
    train_sources: np.ndarray | None = None
    """Source of each training sample, (N,) int64, indices into `sources`."""
    sample: SampleSpec = None  # type: ignore[assignment]  # only until `__post_init__`
    """Description of a sample. Default: an image of the samples' shape."""
    remarks: tuple[str, ...] = ()
    """Notes for users on changes to the samples while they were read."""
    has_places: bool = False
    """Whether there is one label per position of a sample: (N, L) int64 for texts, (N, H, W) int64 for images.
    Positions with `NO_TARGET` are ignored."""

    def __post_init__(self) -> None:
        stored = Pixels if self.sample is None else type(self.sample)
        for split in ("train", "test"):
            images, labels = getattr(self, f"{split}_images"), getattr(self, f"{split}_labels")
            _check_split(split, images, labels, len(self.classes), stored, self.has_places)
        if self.train_images.shape[1:] != self.test_images.shape[1:]:
            raise DataError(
                f"train_images are {self.train_images.shape[1:]} and test_images "
                f"{self.test_images.shape[1:]} (channels, height, width); both splits must have the same shape"
            )
        if self.sample is None:
            object.__setattr__(self, "sample", Pixels(*self.train_images.shape[1:]))

    @property
    def has_words(self) -> bool:
        """Return whether the labels are words instead of classes."""
        return self.train_labels.ndim == 2 and not self.has_numbers and not self.has_places

    @property
    def has_numbers(self) -> bool:
        """Return whether the labels are numbers (one per output of a model) instead of classes or words."""
        return self.train_labels.dtype.kind == "f"

    def as_numbers(self) -> Dataset:
        """Return a copy with numeric labels: 0 or 1 for two classes, else a one-hot vector of the class.

        Partitions still use the classes. Raises `DataError` for words, and for labels with one class per position.
        """
        if self.has_words:
            raise DataError("the labels are words, but the loss needs numbers or classes: remove `loss`")
        if self.has_places:
            raise DataError("the labels have one class per position: set `loss: place_cross_entropy`")
        two = len(self.classes) == 2
        hot = np.eye(len(self.classes), dtype=np.float32)[:, 1:] if two else np.eye(len(self.classes), dtype=np.float32)
        return replace(
            self._grouped(),
            train_labels=hot[self.train_labels],
            test_labels=hot[self.test_labels],
            classes=self.classes[1:] if two else self.classes,
            public_labels=None if self.public_labels is None else hot[self.public_labels],
        )

    def as_tokens(self) -> Dataset:
        """Return a copy for language models: the labels are the texts' own tokens (N, L).

        The classes are the vocabulary. Padding is not a target. Partitions still use the classes.
        """
        assert isinstance(self.sample, Tokens)
        pad = self.sample.pad

        def tokens(images: Images) -> np.ndarray:
            rows = load_in_memory(images)
            return rows if pad is None else np.where(rows == pad, NO_TARGET, rows)

        return replace(
            self._grouped(),
            train_labels=tokens(self.train_images),
            test_labels=tokens(self.test_images),
            classes=self.sample.vocabulary,
            public_labels=None if self.public_images is None else tokens(self.public_images),
            has_places=True,
        )

    def _grouped(self) -> Dataset:
        """Return a copy that keeps its current groups if its labels change."""
        groups, names = self.groups
        return replace(self, sources=names, train_sources=groups)

    @property
    def groups(self) -> tuple[np.ndarray, tuple[str, ...]]:
        """Return the group of each training sample (N,), and the groups' names: sources, else classes.

        Partitions use the groups as labels. Numbers, and labels with one class per position, form one group if there
        are no sources.
        """
        if self.train_sources is None and (self.has_numbers or self.has_places):
            return np.zeros(len(self.train_labels), np.int64), ("all",)
        if self.train_sources is None:
            return self.train_labels, self.classes
        return self.train_sources, self.sources

    @property
    def described(self) -> str:
        """Return a one-line description of the data set: number and kind of the samples, and names of the classes."""
        told, names = self.sample.describe(len(self.train_labels), len(self.test_labels)), self.classes
        listed = ", ".join(names[:_NAMED]) + f" and {len(names) - _NAMED} more" * (len(names) > _NAMED)
        if self.has_numbers:
            return f"{told}, targets {listed}"
        return f"{told}, {len(names)} class{'es' * (len(names) != 1)} ({listed})"

    def with_public(self, share: float) -> Dataset:
        """Return a copy in which a share of the training samples is public instead of owned by clients.

        The choice is deterministic and stratified by group. Raises `DataError` if the public or the training samples
        would be empty.
        """
        count = round(share * len(self.train_labels))
        if not 0 < count < len(self.train_labels):
            raise DataError(
                f"data.public: a share of {share:g} of {len(self.train_labels)} training samples leaves no public or "
                "no private sample; choose another share"
            )
        public = choose_stratified(self.groups[0], count)
        private = np.setdiff1d(np.arange(len(self.train_labels)), public, assume_unique=True)
        return replace(
            self,
            train_images=self._images(private),
            train_labels=self.train_labels[private],
            train_sources=None if self.train_sources is None else self.train_sources[private],
            public_images=self._images(public),
            public_labels=self.train_labels[public],
        )

    def _images(self, rows: np.ndarray) -> Images:
        return self.train_images[rows]


def _check_split(
    split: str, images: Images, labels: np.ndarray, classes: int, sample: type[SampleSpec], places: bool
) -> None:
    if images.dtype not in sample.stored or len(images.shape) != 1 + len(sample.axes) or 0 in images.shape:
        expected = f"{' or '.join(kind.__name__ for kind in sample.stored)} (N, {', '.join(sample.axes)}) with N >= 1"
        raise DataError(f"{split}_images is {images.dtype} {images.shape}, expected {expected}")
    if labels.dtype == np.float32 and labels.shape == (len(images), classes):
        check_numbers(f"{split}_labels", labels)
        return
    if places:
        _check_places(f"{split}_labels", labels, images.shape, classes)
        return
    if labels.dtype != np.int64 or labels.shape[:1] != images.shape[:1] or labels.ndim > 2:
        raise DataError(f"{split}_labels is {labels.dtype} {labels.shape}, expected int64 ({len(images)},)")
    check_labels(f"{split}_labels", labels, classes)


def _check_places(where: str, labels: np.ndarray, images: tuple[int, ...], classes: int) -> None:
    expected = (images[0], *images[1:][-2:])  # (L,) for texts, (H, W) for images
    if labels.dtype != np.int64 or labels.shape != expected:
        raise DataError(f"{where} is {labels.dtype} {labels.shape}, expected int64 {expected}, one class per position")
    check_labels(where, np.where(labels == NO_TARGET, 0, labels), classes)


def check_labels(where: str, labels: np.ndarray, classes: int) -> None:
    """Raise `DataError`, with `where` and the first bad row, unless all labels are in 0 .. classes - 1."""
    outside = (labels < 0) | (labels >= classes)
    wrong = np.flatnonzero(outside.reshape(len(labels), -1).any(1))
    if len(wrong):
        raise DataError(
            f"{where}, row {wrong[0]} (from 0): label {labels[wrong[0]]}, expected 0 to {classes - 1} "
            f"({len(wrong)} such rows in all)"
        )


def check_numbers(where: str, labels: np.ndarray) -> None:
    """Raise `DataError`, with `where` and the first bad row, unless all labels (N, k) are finite."""
    if len(wrong := np.flatnonzero(~np.isfinite(labels).all(1))):
        found = labels[wrong[0]].tolist()
        raise DataError(
            f"{where}, row {wrong[0]} (from 0): {found}, expected finite numbers ({len(wrong)} such rows in all)"
        )


def scale_numbers(train: np.ndarray, test: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scale numeric labels (N, k) and (M, k) to float32, so that each column of the training labels spans [0, 1]."""
    low, high = train.min(0), train.max(0)
    width = np.where(high > low, high - low, 1)
    scaled: list[np.ndarray] = [((part - low) / width).astype(np.float32) for part in (train, test)]
    return scaled[0], scaled[1]


class StoredSplit(NamedTuple):
    """Train or test split as stored: images not yet resized and, if in files, not yet decoded."""

    images: np.ndarray | Sequence[Encoded]
    """Samples in the form of `Dataset`, or N encoded images."""
    labels: np.ndarray
    """Labels (N,) int64, or numbers (N, k)."""

    def take(self, indices: np.ndarray) -> StoredSplit:
        """Return a split with the samples at `indices`, in that order."""
        images = self.images
        chosen = images[indices] if isinstance(images, np.ndarray) else [images[i] for i in indices]
        return StoredSplit(chosen, self.labels[indices])


@component
class Source:
    """Base of all data set components, which selects and resizes the samples that a subclass reads."""

    is_public: ClassVar[bool] = False
    """Whether these samples are public, so that reports may show them (`rayfed.data.sets.is_public`)."""

    size: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Height and width of the images in pixels. Images of another size are resized (bilinear with antialias, without
    keeping proportions). Default: original size."""
    train_samples: Annotated[int, Field(ge=1)] | None = None
    """Number of training samples to use, a deterministic stratified subset. Default: all."""
    test_samples: Annotated[int, Field(ge=1)] | None = None
    """Number of test samples to use, a deterministic stratified subset. Default: all."""

    def load(self) -> Dataset:
        """Load the data set into memory; raise `DataError` for missing, truncated or mislabelled files."""
        train, test, classes = self.chosen()
        train_images, test_images = _pixels(train.images, test.images, self.size)
        return Dataset(train_images, train.labels, test_images, test.labels, classes, remarks=tuple(self.notes()))

    def notes(self) -> Iterable[str]:
        """Return notes for users on how the files were read, and on unused files."""
        return ()

    def chosen(self) -> tuple[StoredSplit, StoredSplit, tuple[str, ...]]:
        """Return the train and test split, reduced to the requested numbers of samples, and the class names."""
        train, test, classes = self.read()
        train = limit_split(self.train_samples, train, "train_samples")
        return train, limit_split(self.test_samples, test, "test_samples"), classes

    def read(self) -> tuple[StoredSplit, StoredSplit, tuple[str, ...]]:
        """Read the train split, the test split and the class names, in their stored form."""
        raise NotImplementedError


def limit_split(samples: int | None, split: StoredSplit, field: str) -> StoredSplit:
    """Return a stratified subset of `samples` samples of a split, or the whole split if `samples` is None.

    Raises `DataError`, naming `field`, if the split has fewer samples.
    """
    if samples is None:
        return split
    if samples > len(split.labels):
        raise DataError(
            f"{field} is {samples}, but the split has only {len(split.labels)} samples; lower it or remove it"
        )
    return split.take(choose_stratified(split.labels, samples))


def _pixels(
    train: np.ndarray | Sequence[Encoded], test: np.ndarray | Sequence[Encoded], size: int | None
) -> tuple[np.ndarray, np.ndarray]:
    if isinstance(train, np.ndarray) and isinstance(test, np.ndarray):
        return resize(train, size), resize(test, size)
    # Both splits are decoded together, because one colour image in either makes both RGB.
    images = decode_images([*train, *test], size)
    return images[: len(train)], images[len(train) :]


def choose_stratified(labels: np.ndarray, samples: int) -> np.ndarray:
    """Return sorted indices (samples,) of a stratified subset, which has the class proportions of the labels.

    The subset is deterministic: evenly spaced positions after sorting by class, or by numbers (N, k).
    """
    by_class = np.argsort(labels, kind="stable") if labels.ndim == 1 else np.lexsort(labels.T[::-1])
    positions = (2 * np.arange(samples) + 1) * len(labels) // (2 * samples)
    return np.sort(by_class[positions])


def hold_out_fifth(split: StoredSplit, where: str) -> tuple[StoredSplit, StoredSplit]:
    """Split samples into a train and a test split; the test split is a deterministic stratified fifth.

    Raises `DataError`, naming `where`, for fewer than 5 samples.
    """
    count = len(split.labels)
    if count < 5:
        raise DataError(f"{where} has {count} samples; at least 5 are needed to hold out a fifth as the test split")
    test = choose_stratified(split.labels, count // 5)
    train = np.setdiff1d(np.arange(count), test, assume_unique=True)
    return split.take(train), split.take(test)
