"""K3's control tokens: their names, and their places among the 256 ids behind the ranks."""

from __future__ import annotations

from typing import Any

NUM_RESERVED = 256

END_OF_MSG = "<|end_of_msg|>"
OPEN = "<|open|>"
CLOSE = "<|close|>"
SEP = "<|sep|>"
MEDIA_BEGIN = "<|media_begin|>"
MEDIA_CONTENT = "<|media_content|>"
MEDIA_END = "<|media_end|>"
MEDIA_PAD = "<|media_pad|>"

OFFSETS: dict[str, int] = {
    "[BOS]": 0,
    "[EOS]": 1,
    END_OF_MSG: 2,
    OPEN: 3,
    CLOSE: 4,
    SEP: 5,
    "[start_header_id]": 6,
    "[end_header_id]": 7,
    "[EOT]": 9,
    MEDIA_BEGIN: 18,
    MEDIA_CONTENT: 19,
    MEDIA_END: 20,
    MEDIA_PAD: 21,
    "<osagent_mode>": 65,
    "[UNK]": 254,
    "[PAD]": 255,
}
"""Name to offset from the first reserved id (163584 in the release)."""


def special_ids(num_ranks: int) -> dict[str, int]:
    """K3's names at K3's offsets, for a rank file of `num_ranks` tokens."""
    return {name: num_ranks + offset for name, offset in OFFSETS.items()}


def tokenizer_config(num_ranks: int) -> dict[str, Any]:
    """The `tokenizer_config.json` that names K3's control tokens beside a rank file.

    Its `default_thinking_effort` is the level a prompt gets when a request names none; null leaves
    the message about it out. A file without the key means "max", the release's default.
    """
    return {
        "added_tokens_decoder": {
            str(token_id): {"content": name, "special": True}
            for name, token_id in special_ids(num_ranks).items()
        },
        "bos_token": "[BOS]",
        "eos_token": END_OF_MSG,
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "default_thinking_effort": None,
    }
