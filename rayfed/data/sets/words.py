"""Images of words from several sources, as used with FedBoosting in the thesis (Ren 2023, section 4.3.2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import numpy as np
from pydantic import Field

from rayfed.core.objective import BLANK
from rayfed.data.base import Dataset
from rayfed.data.words.base import Word
from rayfed.data.words.icdar2015 import Icdar2015
from rayfed.data.words.iiit5k import IIIT5K
from rayfed.data.words.rendered import Rendered
from rayfed.data.words.scut_foru import ScutForu
from rayfed.data.words.svt import SVT
from rayfed.data.words.synth90k import Synth90K
from rayfed.data.words.synthtext import SynthText
from rayfed.errors import DataError
from rayfed.registry import component

Source = Annotated[Synth90K | SynthText | IIIT5K | SVT | ScutForu | Icdar2015 | Rendered, Field(discriminator="format")]


@component
class Words:
    """Grey images of words with 3 to 25 letters and digits, ignoring case; other words are excluded.

    Partitions use the sources instead of classes. With `shards`, `shards_per_client: 1` and as many clients as sources,
    each client has one source.
    """

    train: Annotated[list[Source], Field(min_length=1)]
    """Sources of the training split."""
    test: Annotated[list[Source], Field(min_length=1)]
    """Sources of the test split."""
    height: Annotated[int, Field(ge=1)] = 32
    """Height of an image in pixels."""
    width: Annotated[int, Field(ge=1)] = 100
    """Width of an image in pixels, to which all words are resized."""
    test_proportions: bool = False
    """Keep the proportions of test words, as in tables 4.1 and 4.3 of the thesis. A word narrower than `width` is
    filled up on the right with the grey of its last column. Default: false, all words are resized to `width`."""
    letters: Annotated[str, Field(min_length=1)] = "0123456789abcdefghijklmnopqrstuvwxyz"
    """Letters of words; words with other characters are excluded."""
    shortest: Annotated[int, Field(ge=1)] = 3
    """Minimum number of letters of a word; shorter words are excluded."""
    longest: Annotated[int, Field(ge=1)] = 25
    """Maximum number of letters of a word; longer words are excluded."""
    train_samples: Annotated[int, Field(ge=1)] | None = None
    """Number of words to use from each training source, evenly spaced. Default: all."""
    test_samples: Annotated[int, Field(ge=1)] | None = None
    """Number of words to use from each test source, evenly spaced. Default: all."""

    def load(self) -> Dataset:
        """Load the data set into memory; raise `DataError` for broken files or a source without words."""
        if self.letters != self.letters.lower() or len(set(self.letters)) < len(self.letters):
            raise DataError(
                f"data.letters: '{self.letters}' must contain only lower-case letters and digits, each at most once"
            )
        train = [self._words(source, self.train_samples) for source in self.train]
        test = [self._words(source, self.test_samples) for source in self.test]
        return Dataset(
            *self._arrays([word for words in train for word in words]),
            *self._arrays([word for words in test for word in words], self.test_proportions),
            classes=("", *self.letters),
            sources=tuple(f"{i} {source.format}" for i, source in enumerate(self.train)),
            train_sources=np.repeat(np.arange(len(train)), [len(words) for words in train]),
        )

    def _words(self, source: Source, most: int | None) -> list[Word]:
        letters = set(self.letters)
        try:
            read = list(source.read())
        except DataError:
            raise
        except Exception as error:  # readers can raise any exception for foreign files
            raise DataError(f"{source} cannot be read: {error!r}; check that the files are complete") from error
        words = [w for w in read if self.shortest <= len(w.text) <= self.longest and self._spelt(w) <= letters]
        if not words:
            lengths = f"{self.shortest} to {self.longest}"
            raise DataError(f"data source {source.format} has no word with {lengths} letters out of {self.letters}")
        if most is None or most >= len(words):
            return words
        return [words[i] for i in (2 * np.arange(most) + 1) * len(words) // (2 * most)]

    @staticmethod
    def _spelt(word: Word) -> set[str]:
        return set(word.text.lower())

    def _arrays(self, words: Sequence[Word], proportional: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Return images (N, 1, height, width) uint8 and labels (N, longest) int64, letters from 1."""
        labels = np.full((len(words), self.longest), BLANK, np.int64)
        for row, word in zip(labels, words, strict=True):
            row[: len(word.text)] = [1 + self.letters.index(letter) for letter in word.text.lower()]
        return np.stack([word.pixels(self.height, self.width, proportional) for word in words]), labels
