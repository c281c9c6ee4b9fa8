"""From packages to shards: fetch, read, split, train the tokenizer, encode, write the manifest."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy.typing as npt
from tqdm import tqdm

from perilune.core.errors import ConfigError
from perilune.text.tiktoken_ranks import RankTokenizer, k3_style, load_ranks
from perilune.train import archives, bpe
from perilune.train.corpus import (
    Split,
    SplitDocument,
    read_source,
    split_of,
    without_duplicates,
    without_leaks,
)
from perilune.train.document import KINDS, Document, Kind, plain_text
from perilune.train.encode import DocumentEncoder
from perilune.train.shards import MANIFEST, join, save_shard
from perilune.train.sources import SOURCES, Source, fetch
from perilune.train.synthetic.generate import generate

SYNTHETIC_BYTES = 16_000_000
SYNTHETIC_SEED = 20
SYNTHETIC_ALONE_BYTES = 2_000_000
VALIDATION_PER_MILLE: dict[Kind, int] = {"chat": 5, "code": 5, "prose": 8, "synthetic": 8}
"""About 1.3 MB of text in all."""


class Prepared(NamedTuple):
    manifest_path: Path
    manifest: dict[str, Any]


def prepare(
    out_dir: Path,
    cache_dir: Path,
    *,
    chat_dir: Path,
    tokenizer_dir: Path,
    sources: Iterable[Source] = SOURCES,
    synthetic_bytes: int = SYNTHETIC_BYTES,
    num_ranks: int = bpe.NANO_RANKS,
    limit: int | None = None,
    progress: bool = True,
) -> Prepared:
    """Writes `<split>_<kind>` shards, the validation texts and `manifest.json` into `out_dir`.

    Archives are kept in `cache_dir`; `chat_dir` holds the `smol_chat_*.jsonl.xz` files. A tokenizer
    in `tokenizer_dir` is used as it is, otherwise one is trained and written there. `limit` keeps
    that many documents a source, for trials.
    """
    out_dir.mkdir(parents=True, exist_ok=True)
    documents, origins = _collect(list(sources), cache_dir, chat_dir, limit, progress)
    synthetic = _generate(synthetic_bytes, progress)
    documents += synthetic
    origins.append(
        _origin("synthetic", "this package", str(SYNTHETIC_SEED), "Apache-2.0", synthetic)
    )
    tokenizer = _tokenizer(tokenizer_dir, documents, num_ranks, progress)
    on_sides = [SplitDocument(split_of(d, VALIDATION_PER_MILLE[d.kind]), d) for d in documents]
    kept = without_leaks(on_sides)
    shards = _encode(kept, tokenizer, out_dir, progress)
    manifest = {
        "vocab_size": tokenizer.vocab_size,
        "tokenizer_sha256": archives.sha256(tokenizer_dir / "tiktoken.model"),
        "sources": origins,
        "validation_documents_dropped": len(on_sides) - len(kept),
        "shards": shards,
    }
    path = out_dir / MANIFEST
    path.write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    return Prepared(path, manifest)


def prepare_synthetic(
    out_dir: Path,
    *,
    tokenizer_dir: Path,
    synthetic_bytes: int = SYNTHETIC_ALONE_BYTES,
    num_ranks: int = bpe.NANO_RANKS,
    progress: bool = True,
) -> Prepared:
    """`prepare` with generated text alone, which needs nothing but the tokenizer.

    Raises:
        ConfigError: `tokenizer_dir` holds no tokenizer; none is trained on so little text.
    """
    if not (tokenizer_dir / "tiktoken.model").is_file():
        raise ConfigError(
            f"{tokenizer_dir} holds no tiktoken.model; run this in the repository, "
            "or name a tokenizer's folder with --set tokenizer_dir=DIR"
        )
    return prepare(
        out_dir,
        out_dir,
        chat_dir=out_dir,
        tokenizer_dir=tokenizer_dir,
        sources=(),
        synthetic_bytes=synthetic_bytes,
        num_ranks=num_ranks,
        progress=progress,
    )


def _generate(num_bytes: int, progress: bool) -> list[Document]:
    documents = []
    with tqdm(
        total=num_bytes, desc="generate", unit="B", unit_scale=True, disable=not progress
    ) as bar:
        for document in generate(num_bytes, seed=SYNTHETIC_SEED):
            documents.append(document)
            bar.update(len(plain_text(document).encode()))
    return documents


def _collect(
    sources: list[Source], cache_dir: Path, chat_dir: Path, limit: int | None, progress: bool
) -> tuple[list[Document], list[dict[str, Any]]]:
    documents: list[Document] = []
    origins = []
    for source in tqdm(sources, desc="sources", unit="source", disable=not (progress and sources)):
        fetched = fetch(source, cache_dir, chat_dir)
        found = read_source(fetched)[:limit]
        documents += found
        version = fetched.path.name if source.origin == "debian" else source.version
        origin = _origin(source.name, source.origin, version, source.licence, found)
        if fetched.sha256 is not None:
            origin |= {"archive": fetched.path.name, "sha256": fetched.sha256}
        origins.append(origin)
    return list(without_duplicates(documents)), origins


def _origin(
    name: str, origin: str, version: str, licence: str, documents: list[Document]
) -> dict[str, Any]:
    return {
        "name": name,
        "origin": origin,
        "version": version,
        "licence": licence,
        "kinds": sorted({document.kind for document in documents}),
        "num_documents": len(documents),
        "text_bytes": sum(len(plain_text(document).encode()) for document in documents),
        "text_sha256": _text_sha256(documents),
    }


def _text_sha256(documents: list[Document]) -> str:
    """Of what was read, whatever it was read from: sizes and texts in order."""
    digest = hashlib.sha256()
    for document in documents:
        text = plain_text(document).encode()
        digest.update(f"{len(text)}:".encode() + text)
    return digest.hexdigest()


def _tokenizer(
    folder: Path, documents: list[Document], num_ranks: int, progress: bool
) -> RankTokenizer:
    path = folder / "tiktoken.model"
    if not path.exists():
        training = (d for d in documents if split_of(d, VALIDATION_PER_MILLE[d.kind]) == "train")
        texts = bpe.sample(training, bpe.SAMPLE_BYTES)
        bpe.write_tokenizer(
            folder, bpe.ranks_of(bpe.train_bpe(texts, num_ranks, progress=progress))
        )
    ranks = load_ranks(path)
    if len(ranks) != num_ranks:
        raise ConfigError(f"{path} holds {len(ranks)} tokens, {num_ranks} are wanted")
    return k3_style(ranks)


def _encode(
    documents: list[SplitDocument], tokenizer: RankTokenizer, out_dir: Path, progress: bool
) -> dict[str, Any]:
    encoder = DocumentEncoder(tokenizer)
    encoded: dict[tuple[Split, Kind], list[npt.NDArray[Any]]] = defaultdict(list)
    texts: dict[tuple[Split, Kind], list[str]] = defaultdict(list)
    text_bytes: dict[tuple[Split, Kind], int] = defaultdict(int)
    for split, document in tqdm(documents, desc="encode", unit="doc", disable=not progress):
        key = split, document.kind
        text = plain_text(document)
        encoded[key].append(encoder.encode(document))
        text_bytes[key] += len(text.encode()) + 1
        if key[0] == "validation":
            texts[key].append(text + "\n")
    entries = {}
    for kind in KINDS:
        for split in ("train", "validation"):
            name = f"{split}_{kind}"
            entries[name] = _write(out_dir, name, encoded.pop((split, kind), []))
            entries[name]["text_bytes"] = text_bytes[split, kind]
        (out_dir / f"validation_{kind}.txt").write_text(
            "".join(texts["validation", kind]), encoding="utf-8", newline=""
        )
    return entries


def _write(out_dir: Path, name: str, documents: list[npt.NDArray[Any]]) -> dict[str, Any]:
    shard = join(documents)
    paths = save_shard(out_dir, name, shard)
    return {
        "num_tokens": len(shard.tokens),
        "num_documents": shard.num_documents,
        "files": {path.name: archives.sha256(path) for path in paths},
    }
