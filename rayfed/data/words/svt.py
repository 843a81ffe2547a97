"""Reader of Street View Text (Wang, Babenko and Belongie 2011, "End-to-End Scene Text Recognition")."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal
from xml.etree import ElementTree

from rayfed.data.words.base import LocalReader, Word
from rayfed.errors import DataError
from rayfed.registry import component


@component
class SVT(LocalReader):
    """Words of Street View Text: `train.xml` and `test.xml`, which list pictures and rectangles of words."""

    format: Literal["svt"]
    split: Literal["train", "test"] = "test"
    """Split to read."""

    def read(self) -> Iterator[Word]:
        """Read the words picture by picture, in the order of the XML file."""
        listed = self.file(f"{self.split}.xml")
        try:
            for picture in ElementTree.parse(listed).getroot().iter("image"):
                path = listed.parent / str(picture.findtext("imageName"))
                for rectangle in picture.iter("taggedRectangle"):
                    x, y, width, height = (float(rectangle.attrib[side]) for side in ("x", "y", "width", "height"))
                    yield Word(str(rectangle.findtext("tag")), path, (x, y, x + width, y + height))
        except (ElementTree.ParseError, KeyError, ValueError) as error:
            raise DataError(
                f"{listed} does not have the format of SVT: {error!r}; download the data set again"
            ) from error
