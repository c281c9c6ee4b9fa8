"""Incremental detokenizer: token ids to text, one id at a time, never half a code point."""

from __future__ import annotations

import codecs

from perilune.text.tokenizer import Tokenizer


class Utf8Stream:
    """Bytes to text piece by piece: the joined pieces equal one decode of all the bytes.

    Bytes that are not UTF-8 become U+FFFD exactly as in `bytes.decode(errors="replace")`.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, data: bytes) -> str:
        """Text that is certain after these bytes; an unfinished code point waits."""
        return self._decoder.decode(data)

    def flush(self) -> str:
        """Text of the bytes that still wait; the stream is empty afterwards."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


class Detokenizer:
    """Text of a token sequence as it grows. Control tokens are left out."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._hidden = tokenizer.control_ids
        self._stream = Utf8Stream()

    def feed(self, token_id: int) -> str:
        """Text that this token completes, maybe empty.

        Raises:
            TextError: no such token.
        """
        if token_id in self._hidden:
            return ""
        return self._stream.push(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        """Text of a code point that never got its last byte: U+FFFD, or nothing."""
        return self._stream.flush()
