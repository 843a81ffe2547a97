"""Recognition of images and other files in users' folders."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path

from PIL import Image

from rayfed.data.dicom import is_dicom

ENDINGS = frozenset(
    {
        *(".apng", ".avif", ".bmp", ".dcm", ".dib", ".dicom", ".gif", ".jfif", ".jif", ".jp2", ".jpe", ".jpeg"),
        *(".jpg", ".pbm", ".pgm", ".png", ".pnm", ".ppm", ".tif", ".tiff", ".webp"),
    }
)
LABEL_COLUMNS = ("label", "labels", "class", "target", "diagnosis", "category", "dx")
"""Names (lower case) that identify the column of classes."""
_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""Pillow's names of the formats that are recognised without a file extension."""
_LABEL_ENDINGS = frozenset({".csv", ".json", ".jsonl", ".ods", ".tsv", ".txt", ".xls", ".xlsx"})
"""Extensions of files next to class folders that may contain labels."""
_ANIMATED = frozenset({".apng", ".gif", ".webp"})
_LEFT_BY_TOOLS = frozenset({"__macosx", "__pycache__", "@eadir", "$recycle.bin", "system volume information"})
"""Folders (lower case) made by systems and tools, in addition to names that start with a dot."""
_SYSTEM_FILES = frozenset({"thumbs.db", "ehthumbs.db", "desktop.ini", "icon\r"})
"""Files (lower case) made by systems, in addition to files without an image whose names start with a dot."""


def is_image(path: Path) -> bool:
    """Return whether a file is an image, by its extension or, without an extension, by its content.

    Empty files and files that macOS adds to images (`._1.png`) do not count.
    """
    if path.name.startswith("._") or is_empty(path):
        return False
    if path.suffix.lower() in ENDINGS:
        return True
    return not path.suffix[1:].isalpha() and _has_image(path)  # numbers may be part of a DICOM identifier


def is_empty(path: Path) -> bool:
    """Return whether a file is empty."""
    try:
        return path.stat().st_size == 0
    except OSError:
        return False


def is_left_by_tools(folder: Path) -> bool:
    """Return whether a folder's name shows that it is hidden or made by a system or tool, such as `__MACOSX`."""
    return folder.name.startswith(".") or folder.name.lower() in _LEFT_BY_TOOLS


def is_sample(path: Path, root: Path) -> bool:
    """Return whether a file below `root` may be a sample: the path shows no folder or file of systems or tools."""
    folders = path.relative_to(root).parents
    return not path.name.startswith("._") and not any(map(is_left_by_tools, list(folders)[:-1]))


def notes_on_files(root: Path, used: Collection[Path], others: Collection[Path] = ()) -> Iterator[str]:
    """Yield notes on files below `root` that look like samples but are not used, and on animated images.

    Other files are included if they are in a folder with used files, or at the root and may contain labels. `others`
    and files made by systems are never included.
    """
    known, folders = {*used, *others}, {path.parent for path in used}
    kinds = Counter[str]()
    examples = dict[str, Path]()
    for path in sorted(path for path in root.rglob("*") if path not in known and path.is_file()):
        if kind := _unused(path, root, path.parent in folders):
            kinds[kind] += 1
            examples.setdefault(kind, path.relative_to(root))
    if kinds:
        counts = (f"{count} {kind} (for example {examples[kind]})" for kind, count in kinds.items())
        yield f"data: unused files in {root}: {', '.join(counts)}"
    if animated := sum(path.suffix.lower() in _ANIMATED and _is_animated(path) for path in used):
        yield f"data: animated images: {animated}; only the first frame of each animation is used"


def _unused(path: Path, root: Path, is_among_samples: bool) -> str:
    """Return the kind of an unused file as text; empty if it does not look like a sample."""
    looks_like_image = path.suffix.lower() in ENDINGS
    if not is_sample(path, root):
        return "left by systems or tools" if looks_like_image else ""
    if path.name.lower() in _SYSTEM_FILES or (path.name.startswith(".") and not looks_like_image):
        return ""
    if is_empty(path):
        return "empty" if looks_like_image or is_among_samples else ""
    if is_image(path):
        return "images that are not samples"
    if is_among_samples or (path.parent == root and path.suffix.lower() in _LABEL_ENDINGS):
        return f"with the extension {path.suffix}" if path.suffix else "without an extension"
    return ""


def _has_image(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            if is_dicom(file.read(132)):
                return True
        with Image.open(path, formats=_FORMATS):
            return True
    except Image.DecompressionBombError:  # reading the image raises an error later
        return True
    except (OSError, ValueError, SyntaxError):
        return False


def _is_animated(path: Path) -> bool:
    try:
        with Image.open(path) as picture:
            return bool(getattr(picture, "is_animated", False))
    except (Image.DecompressionBombError, OSError, ValueError, SyntaxError):  # reading the image raises an error later
        return False


def sort_class_names(names: set[str]) -> tuple[str, ...]:
    """Sort class names: numerically if all are numbers, else alphabetically."""
    numbers = all(name.removeprefix("-").isdecimal() for name in names)
    return tuple(sorted(names, key=int) if numbers else sorted(names))
