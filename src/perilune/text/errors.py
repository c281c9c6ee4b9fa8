"""Errors of the text room.

RequestError
└── TextError          text or a conversation that cannot be encoded
CheckpointError
└── TokenizerError     a tokenizer's files are wrong
"""

from perilune.core.errors import CheckpointError, RequestError


class TextError(RequestError):
    """Text or a conversation that cannot be encoded; the message says where and why."""


class TokenizerError(CheckpointError):
    """A tokenizer's files are wrong; the message names the file and, if it can, the line."""
