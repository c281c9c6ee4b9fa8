"""Control tokens of Kimi K2 and Kimi Linear: K3's slots, with other meanings."""

from __future__ import annotations

END = "<|im_end|>"
USER = "<|im_user|>"
ASSISTANT = "<|im_assistant|>"
SYSTEM = "<|im_system|>"
MIDDLE = "<|im_middle|>"
CALLS_BEGIN = "<|tool_calls_section_begin|>"
CALLS_END = "<|tool_calls_section_end|>"
CALL_BEGIN = "<|tool_call_begin|>"
ARGUMENTS_BEGIN = "<|tool_call_argument_begin|>"
CALL_END = "<|tool_call_end|>"
THINK = "<think>"
END_THINK = "</think>"

REQUIRED = frozenset({END, USER, ASSISTANT, SYSTEM, MIDDLE})
"""What a conversation without tools needs."""

OFFSETS: dict[str, int] = {
    "[BOS]": 0,
    "[EOS]": 1,
    END: 2,
    USER: 3,
    ASSISTANT: 4,
    SYSTEM: 10,
    CALLS_BEGIN: 11,
    CALLS_END: 12,
    CALL_BEGIN: 13,
    ARGUMENTS_BEGIN: 14,
    CALL_END: 15,
    MIDDLE: 17,
    THINK: 22,
    END_THINK: 23,
    "[UNK]": 254,
    "[PAD]": 255,
}
"""Name to offset from the first reserved id (163584 in the releases)."""


def special_ids(num_ranks: int) -> dict[str, int]:
    """The names at their offsets, for a rank file of `num_ranks` tokens."""
    return {name: num_ranks + offset for name, offset in OFFSETS.items()}
