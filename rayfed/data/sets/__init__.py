"""Data sets: one data set or family per file, each a component with `load() -> Dataset`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from rayfed import registry
from rayfed.errors import UserError, nearest

TABLE: dict[str, str] = {
    "digits": "rayfed.data.sets.digits:Digits",
    "photos": "rayfed.data.sets.photos:Photos",
    "mnist": "rayfed.data.sets.mnist:MNIST",
    "fashion_mnist": "rayfed.data.sets.mnist:FashionMNIST",
    "cifar10": "rayfed.data.sets.cifar:CIFAR10",
    "cifar100": "rayfed.data.sets.cifar:CIFAR100",
    "svhn": "rayfed.data.sets.svhn:SVHN",
    "gaussian_toy": "rayfed.data.sets.gaussian_toy:GaussianToy",
    "image_folder": "rayfed.data.sets.image_folder:ImageFolder",
    "image_table": "rayfed.data.sets.image_table:ImageTable",
    "image_masks": "rayfed.data.sets.image_masks:ImageMasks",
    "hugging_face": "rayfed.data.sets.hugging_face:HuggingFaceImages",
    "diabetes": "rayfed.data.sets.tabular:Diabetes",
    "table": "rayfed.data.sets.tabular:Table",
    "text": "rayfed.data.sets.text:Text",
    "text_table": "rayfed.data.sets.text_table:TextTable",
    "words": "rayfed.data.sets.words:Words",
    "arrow": "rayfed.data.sets.arrow:Arrow",
    "parquet": "rayfed.data.sets.parquet:Parquet",
}


def check_given(data: str) -> None:
    """Raise `UserError` unless the argument of `--data` is a file, folder, URL, or a data set's name.

    Nothing is imported or read, so a mistyped path is reported immediately.
    """
    known = registry.table("datasets")
    if not Path(data).expanduser().exists() and data not in known and ":" not in data:
        raise UserError(f"--data {data}: there is no such file, folder or data set; {nearest(data, known)}")


def is_public(spec: Mapping[str, Any] | str) -> bool:
    """Return whether the samples of a scenario's section `data` are known to be public.

    Components of rayfed declare it (`is_public`). Components of users are never public.
    """
    written = {"name": spec} if isinstance(spec, str) else spec
    if written["name"] not in TABLE:
        return False
    target = registry.find("datasets", written["name"])
    if not getattr(target, "is_public", False):
        return False
    own = {field.name: written[field.name] for field in fields(target) if field.name in written}
    try:
        return bool(TypeAdapter(target).validate_python(own).is_public)
    except ValidationError:  # the section may be from another version of rayfed
        return False
