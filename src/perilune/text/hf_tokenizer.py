"""Tokenizers of the `tokenizer.json` kind, through the `tokenizers` library."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perilune.core.errors import UnsupportedError
from perilune.text.errors import TextError, TokenizerError
from perilune.text.tokenizer import SegmentCodec, check_encodable

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RustTokenizer


class HfTokenizer(SegmentCodec):
    """A byte-level BPE of `tokenizer.json`.

    The added tokens (but for white space) are taken out of the library's hands: it would find
    them in ordinary text, where they must stay text.
    """

    def __init__(self, spec: dict[str, Any], eos_names: Iterable[str], *, where: str) -> None:
        """`spec` is the parsed file, `where` its name for errors."""
        _check_byte_level(spec, where)
        added = [token for token in spec.get("added_tokens", ()) if token["content"].strip()]
        self.special_ids = {token["content"]: token["id"] for token in added}
        self.control_ids = frozenset(self.special_ids.values())
        self.eos_ids = frozenset(
            self.special_ids[name] for name in eos_names if name in self.special_ids
        )
        self._names = {token_id: name for name, token_id in self.special_ids.items()}
        self._tokenizer = _library_tokenizer(spec, where)
        vocab = self._tokenizer.get_vocab(with_added_tokens=True).values()
        self.vocab_size = 1 + max([*vocab, *self.control_ids])
        pattern = "|".join(map(re.escape, sorted(self.special_ids, key=len, reverse=True)))
        self._special_pattern = re.compile(f"({pattern})") if pattern else None

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        check_encodable(text)
        if not allow_special or self._special_pattern is None:
            return self._encode_ordinary(text)
        ids: list[int] = []
        for piece in self._special_pattern.split(text):
            special_id = self.special_ids.get(piece)
            ids += self._encode_ordinary(piece) if special_id is None else [special_id]
        return ids

    def _encode_ordinary(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids if text else []

    def token_bytes(self, token_id: int) -> bytes:
        name = self._names.get(token_id)
        if name is not None:
            return name.encode()
        token = self._tokenizer.id_to_token(token_id) if token_id >= 0 else None
        if token is None:
            raise TextError(f"token id {token_id} is not in the vocabulary")
        return _bytes_of(token)


def load_hf(path: Path, eos_names: Iterable[str]) -> HfTokenizer:
    """Reads a `tokenizer.json`.

    Raises:
        TokenizerError: not such a file.
        UnsupportedError: a kind of model whose tokens are not bytes.
    """
    try:
        spec = json.loads(path.read_bytes())
    except ValueError as error:
        raise TokenizerError(f"{path}: not JSON ({error})") from error
    if not isinstance(spec, dict) or not isinstance(spec.get("model"), dict):
        raise TokenizerError(f"{path}: no tokenizer model in it")
    return HfTokenizer(spec, eos_names, where=str(path))


def _library_tokenizer(spec: dict[str, Any], where: str) -> RustTokenizer:
    try:
        import tokenizers
    except ImportError as error:
        raise UnsupportedError(
            f"{where} needs the tokenizers package: pip install 'perilune[engine]'"
        ) from error
    text = json.dumps(_text_only(spec))
    try:
        return tokenizers.Tokenizer.from_str(text)
    # The library raises nothing more exact than Exception.
    except Exception as error:
        raise TokenizerError(f"{where}: {error}") from error


def _text_only(spec: dict[str, Any]) -> dict[str, Any]:
    """The same tokenizer without its control tokens, and with nothing added around a text."""
    added = spec.get("added_tokens", ())
    blank = [token for token in added if not token["content"].strip()]
    model = spec["model"]
    hidden = {token["content"] for token in added if token["content"].strip()}
    hidden -= {model.get("unk_token")}
    vocab = {token: i for token, i in model["vocab"].items() if token not in hidden}
    return {
        **spec,
        "added_tokens": blank,
        "model": {**model, "vocab": vocab},
        "post_processor": None,
        "truncation": None,
        "padding": None,
    }


def _check_byte_level(spec: dict[str, Any], where: str) -> None:
    """Only where every token is a string of bytes can text be put together byte by byte."""
    kind = spec["model"].get("type")
    decoder = spec.get("decoder") or {}
    kinds = {part.get("type") for part in (decoder, *decoder.get("decoders", ()))}
    if kind != "BPE" or "ByteLevel" not in kinds:
        raise UnsupportedError(f"{where}: only byte-level BPE is supported, this is {kind}")


def _byte_alphabet() -> dict[str, int]:
    """The character that byte-level BPE writes for each byte.

    Printable Latin-1 stands for itself; the other bytes, in order, for U+0100 and on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _bytes_of(token: str) -> bytes:
    """Bytes of a token; an added one (white space) may be written as itself."""
    if all(char in _BYTE_OF for char in token):
        return bytes(_BYTE_OF[char] for char in token)
    return token.encode()
