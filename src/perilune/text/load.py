"""Tokenizer and chat format of a checkpoint directory, by the files that are there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from perilune.core.errors import UnsupportedError
from perilune.text import im_names, k3_names
from perilune.text.chat import ChatFormat
from perilune.text.errors import TokenizerError
from perilune.text.hf_tokenizer import load_hf
from perilune.text.im_format import ImFormat
from perilune.text.tiktoken_ranks import RankTokenizer, load_ranks
from perilune.text.tokenizer import Tokenizer
from perilune.text.xtml_format import XtmlFormat

RANKS_FILE = "tiktoken.model"
HF_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"

_XTML_NAMES = frozenset({k3_names.OPEN, k3_names.CLOSE, k3_names.SEP, k3_names.END_OF_MSG})
_MESSAGE_ENDS = (k3_names.END_OF_MSG, im_names.END)
"""What ends a message, and so a generation: before the `eos_token` of the configuration, which
names the end of a document in some releases."""


def load_tokenizer(directory: str | Path) -> Tokenizer:
    """The tokenizer of a checkpoint: `tiktoken.model`, else `tokenizer.json`.

    Raises:
        TokenizerError: neither file is there, or one is wrong.
        UnsupportedError: a kind of `tokenizer.json` that is not byte-level BPE.
    """
    directory = Path(directory)
    if (directory / RANKS_FILE).is_file():
        return _load_ranks(directory)
    if (directory / HF_FILE).is_file():
        config = _read_config(directory) if (directory / CONFIG_FILE).is_file() else {}
        return load_hf(directory / HF_FILE, _eos_candidates(config))
    raise TokenizerError(f"{directory}: no tokenizer ({RANKS_FILE} or {HF_FILE})")


def load_chat_format(directory: str | Path, tokenizer: Tokenizer | None = None) -> ChatFormat:
    """The chat format that the names of the control tokens tell.

    `tokenizer` is that of `directory` if it is loaded already.

    Raises:
        TokenizerError: as `load_tokenizer`, or names of two formats at once.
        UnsupportedError: names of no format that is known here.
    """
    directory = Path(directory)
    tokenizer = tokenizer or load_tokenizer(directory)
    names = tokenizer.special_ids.keys()
    if names >= _XTML_NAMES and names >= im_names.REQUIRED:
        raise TokenizerError(f"{directory}: control tokens of two chat formats at once")
    if names >= _XTML_NAMES:
        return XtmlFormat(tokenizer, default_effort=_default_effort(directory))
    if names >= im_names.REQUIRED:
        return ImFormat(tokenizer)
    raise UnsupportedError(f"{directory}: the tokenizer's control tokens belong to no chat format")


def _load_ranks(directory: Path) -> RankTokenizer:
    """Names of the control tokens stand beside the rank file, never in it."""
    ranks = load_ranks(directory / RANKS_FILE)
    config = _read_config(directory)
    special_ids = _special_ids(config, num_ranks=len(ranks), where=directory / CONFIG_FILE)
    eos_ids = [special_ids[name] for name in _eos_candidates(config) if name in special_ids]
    if not eos_ids:
        raise TokenizerError(f"{directory / CONFIG_FILE}: no token that ends a message is named")
    return RankTokenizer(ranks, special_ids, eos_ids[:1])


def _special_ids(config: dict[str, Any], *, num_ranks: int, where: Path) -> dict[str, int]:
    reserved = range(num_ranks, num_ranks + k3_names.NUM_RESERVED)
    special_ids: dict[str, int] = {}
    for key, entry in _added_tokens(config, where).items():
        name = entry.get("content") if isinstance(entry, dict) else None
        if not isinstance(name, str) or not name or not key.isdecimal():
            raise TokenizerError(f"{where}: added_tokens_decoder[{key!r}] names no token")
        if int(key) not in reserved:
            raise TokenizerError(
                f"{where}: {name} has id {key}, but {num_ranks} ranks leave the ids "
                f"{reserved.start} to {reserved.stop - 1} to control tokens"
            )
        if name in special_ids:
            raise TokenizerError(f"{where}: {name} has the ids {special_ids[name]} and {key}")
        special_ids[name] = int(key)
    return special_ids


def _added_tokens(config: dict[str, Any], where: Path) -> dict[str, Any]:
    added = config.get("added_tokens_decoder")
    if not isinstance(added, dict) or not added:
        raise TokenizerError(f"{where}: no added_tokens_decoder, so no control token has a name")
    return added


def _eos_candidates(config: dict[str, Any]) -> list[str]:
    """Names of an end token, the best first."""
    eos = config.get("eos_token")
    name = eos.get("content") if isinstance(eos, dict) else eos
    return [*_MESSAGE_ENDS, name] if isinstance(name, str) else [*_MESSAGE_ENDS]


def _default_effort(directory: Path) -> str | None:
    """The release has no such key, and its tokenizer defaults to max."""
    path = directory / CONFIG_FILE
    config = _read_config(directory) if path.is_file() else {}
    effort = config.get("default_thinking_effort", "max")
    if effort not in (None, "low", "medium", "high", "max"):
        raise TokenizerError(f"{path}: default_thinking_effort {effort!r} is no level")
    return effort


def _read_config(directory: Path) -> dict[str, Any]:
    path = directory / CONFIG_FILE
    if not path.is_file():
        raise TokenizerError(f"{path} is missing; without it no control token has a name")
    try:
        config = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{path}: not JSON ({error})") from error
    if not isinstance(config, dict):
        raise TokenizerError(f"{path}: not a JSON object")
    return config
