"""A hook of MkDocs: files outside `docs/` that pages link to are pages of the site, too.

Links in the repository's Markdown are relative to the file, as GitHub follows them: `../rayfed/update.py`. On the site
such a file is a page of its source, and `README.md`, `CONTRIBUTING.md` and `CHANGELOG.md` are pages as any other.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

REPOSITORY = Path(__file__).resolve().parent.parent
PAGES = {"README.md": "readme.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""Markdown outside `docs/` -> its page."""
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)\s#]+)(?=[)#])")
"""The target of a link to another file, without its anchor."""
LANGUAGES = {".py": "python", ".yaml": "yaml", ".json": "json"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each file outside `docs/` that a page links to."""
    sources = {name: (REPOSITORY / name).read_text() for name in PAGES}
    sources |= {f"docs/{file.src_uri}": file.content_string for file in files.documentation_pages()}
    for name, page in PAGES.items():
        files.append(File.generated(config, page, content=sources[name]))
    linked = {path for name, text in sources.items() for path in _targets(name, text)}
    for path in sorted(linked - sources.keys()):
        if not path.startswith("docs/") and (REPOSITORY / path).is_file():
            files.append(File.generated(config, _page(path), content=_shown(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links between files of the repository into links between pages of the site."""
    here = page.file.src_uri
    if here.startswith("source/"):
        return markdown
    outside = {page: name for name, page in PAGES.items()}
    name = outside.get(here, f"docs/{here}")
    return LINK.sub(lambda link: relpath(_page(_target(name, link[1])), PurePosixPath(here).parent), markdown)


def _targets(name: str, text: str) -> Iterator[str]:
    yield from (_target(name, link) for link in LINK.findall(text))


def _target(name: str, link: str) -> str:
    """Return what a link in a file of the repository leads to, relative to the repository."""
    return normpath(PurePosixPath(name).parent / link)


def _page(path: str) -> str:
    """Return the page of the site that shows a file of the repository."""
    return PAGES.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else f"source/{path}.md")


def _shown(path: str) -> str:
    """Return the page of a source file."""
    language = LANGUAGES.get(Path(path).suffix, "text")
    text = (REPOSITORY / path).read_text()
    return f"---\nsearch:\n  exclude: true\nhide: [toc]\n---\n# {path}\n\n``````{language}\n{text}\n``````\n"
