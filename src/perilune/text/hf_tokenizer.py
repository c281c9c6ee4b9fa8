"""Tokenizers of the `tokenizer.json` kind, through the `tokenizers` library."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perilune.core.errors import UnsupportedError
from perilune.text.errors import TextError, TokenizerError
from perilune.text.tokenizer import SegmentCodec, check_encodable

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RustTokenizer


class HfTokenizer(SegmentCodec):
    """A byte-level BPE of `tokenizer.json`.

    The added tokens are taken out of the library's hands: it would find the names of control
    tokens in ordinary text, where they must stay text. Added white space is text, not control.
    """

    def __init__(self, spec: dict[str, Any], eos_names: Iterable[str], *, where: str) -> None:
        """`spec` is the parsed file, `where` its name for errors.

        Raises:
            TokenizerError: a part of `spec` is missing or wrong.
            UnsupportedError: a kind of model whose tokens are not bytes.
        """
        _check_byte_level(spec, where)
        added = _added_tokens(spec, where)
        self.special_ids = {name: i for name, i in added.items() if name.strip()}
        self.control_ids = frozenset(self.special_ids.values())
        self.eos_ids = frozenset(added[name] for name in eos_names if name in self.special_ids)
        self.vocab_size = 1 + max([*spec["model"]["vocab"].values(), *added.values()], default=-1)
        self._added = added
        self._names = {token_id: name for name, token_id in added.items()}
        self._any_added = _pattern(added)
        self._blank = _pattern(added.keys() - self.special_ids.keys())
        self._library = _library_tokenizer(_text_only(spec, self.special_ids), where)

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        check_encodable(text)
        ids: list[int] = []
        # The pattern has one group, so every second piece is the name of an added token.
        for i, piece in enumerate((self._any_added if allow_special else self._blank).split(text)):
            if i % 2:
                ids.append(self._added[piece])
            elif piece:
                ids += self._library.encode(piece, add_special_tokens=False).ids
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        name = self._names.get(token_id)
        if name is not None:
            return name.encode()
        known = 0 <= token_id < self.vocab_size
        token = self._library.id_to_token(token_id) if known else None
        if token is None:
            raise TextError(f"token id {token_id} is not in the vocabulary")
        return bytes(_BYTE_OF[char] for char in token)


def load_hf(path: Path, eos_names: Iterable[str]) -> HfTokenizer:
    """Reads a `tokenizer.json`.

    Raises:
        TokenizerError: not such a file.
        UnsupportedError: a kind of model whose tokens are not bytes.
    """
    try:
        spec = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{path}: not JSON ({error})") from error
    if not isinstance(spec, dict) or not isinstance(spec.get("model"), dict):
        raise TokenizerError(f"{path}: no tokenizer model in it")
    return HfTokenizer(spec, eos_names, where=str(path))


def _check_byte_level(spec: dict[str, Any], where: str) -> None:
    """Only where every token is a string of bytes can text be put together byte by byte."""
    model = spec["model"]
    decoder = spec.get("decoder") or {}
    kinds = {part.get("type") for part in (decoder, *decoder.get("decoders", ()))}
    if model.get("type") != "BPE" or "ByteLevel" not in kinds:
        raise UnsupportedError(
            f"{where}: only byte-level BPE is supported, not {model.get('type')}"
        )
    if not isinstance(model.get("vocab"), dict):
        raise TokenizerError(f"{where}: the model has no vocabulary")


def _added_tokens(spec: dict[str, Any], where: str) -> dict[str, int]:
    try:
        added = {token["content"]: token["id"] for token in spec.get("added_tokens") or ()}
    except (KeyError, TypeError) as error:
        raise TokenizerError(f"{where}: an added token has no content or no id") from error
    for token in spec["model"]["vocab"].keys() - added.keys():
        if not all(char in _BYTE_OF for char in token):
            raise TokenizerError(f"{where}: token {token!r} is not written in bytes")
    return added


def _pattern(names: Iterable[str]) -> re.Pattern[str]:
    """Finds any of the names, the longest where several begin; finds nothing if there are none."""
    longest_first = sorted(names, key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, longest_first))})" if longest_first else "((?!))")


def _text_only(spec: dict[str, Any], hidden: Mapping[str, int]) -> dict[str, Any]:
    """The same tokenizer without added and control tokens, and with nothing put around a text."""
    model = spec["model"]
    vocab = {
        token: i
        for token, i in model["vocab"].items()
        if token not in hidden or token == model.get("unk_token")
    }
    bare = {"added_tokens": [], "post_processor": None, "truncation": None, "padding": None}
    return {**spec, **bare, "model": {**model, "vocab": vocab}}


def _library_tokenizer(spec: dict[str, Any], where: str) -> RustTokenizer:
    try:
        import tokenizers
    except ImportError as error:
        raise UnsupportedError(
            f"{where} needs the tokenizers package: pip install 'perilune[engine]'"
        ) from error
    try:
        return tokenizers.Tokenizer.from_str(json.dumps(spec))
    # The library raises nothing more exact than Exception.
    except Exception as error:
        raise TokenizerError(f"{where}: {error}") from error


def _byte_alphabet() -> dict[str, int]:
    """The character that byte-level BPE writes for each byte.

    Printable Latin-1 stands for itself; the other bytes, in order, for U+0100 and on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
