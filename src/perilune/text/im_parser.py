"""Streaming parser of Kimi K2's and Kimi Linear's output, on token ids."""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import Enum, auto

from perilune.core.types import ReasoningDelta, TextDelta, TextLogprob, ToolCallDelta
from perilune.text import argument_json, im_names
from perilune.text.channel_text import ChannelText
from perilune.text.chat import ChatDelta, NoteKind, ParseNote
from perilune.text.errors import TextError
from perilune.text.tokenizer import Tokenizer

_CALL_ID = re.compile(r"(?:functions\.)?(.+?):\d+", re.DOTALL)
_SANITISED_ID = re.compile(r"functions_(.+)_\d+", re.DOTALL)


class Place(Enum):
    """Where in the message the next token stands."""

    THINK = auto()
    TEXT = auto()
    CALL_ID = auto()
    ARGUMENTS = auto()


class ImParser:
    """Ids of one generated message to deltas.

    A call comes out when it is closed and its arguments are a JSON object; otherwise its raw text
    is kept in `notes`. Its id is the one that the model wrote, byte for byte.
    """

    def __init__(self, tokenizer: Tokenizer, *, offered: frozenset[str] = frozenset()) -> None:
        """`offered`: names of the tools, to read an id that lost its punctuation."""
        self._tokenizer = tokenizer
        self._offered = offered
        self._ends = tokenizer.eos_ids
        self._place = self._call_home = Place.TEXT
        self._reasoning, self._text = ChannelText(ReasoningDelta), ChannelText(TextDelta)
        self._call_id, self._arguments = bytearray(), bytearray()
        self._fault: str | None = None
        self._complete = False
        self._handlers = self._control_handlers()
        self.notes: list[ParseNote] = []
        self.num_calls = 0
        self.reasoning_tokens = 0

    def _control_handlers(self) -> dict[int, Callable[[], list[ChatDelta]]]:
        handlers = {
            im_names.THINK: lambda: self._go(Place.THINK),
            im_names.END_THINK: lambda: self._go(Place.TEXT),
            im_names.CALLS_BEGIN: self._leave_text,
            im_names.CALLS_END: lambda: self._go(self._call_home),
            im_names.CALL_BEGIN: self._begin_call,
            im_names.ARGUMENTS_BEGIN: self._begin_arguments,
            im_names.CALL_END: self._end_call,
            im_names.END: self._end_message,
        }
        names = self._tokenizer.special_ids
        known = {names[name]: handler for name, handler in handlers.items() if name in names}
        return dict.fromkeys(self._ends, self._end_message) | known

    def feed(self, token_id: int, logprob: TextLogprob | None = None) -> list[ChatDelta]:
        """Deltas that this token completes; see `ChatParser.feed`."""
        self.reasoning_tokens += self._place is Place.THINK
        handler = self._handlers.get(token_id)
        if handler is not None:
            return handler()
        try:
            data = self._tokenizer.token_bytes(token_id)
        except TextError as error:
            # An embedding may have more rows than the tokenizer has tokens.
            return self._stray(str(error))
        if token_id in self._tokenizer.control_ids:
            return self._stray(data.decode("utf-8", errors="replace"))
        if self._place is Place.CALL_ID:
            self._call_id += data
            return []
        if self._place is Place.ARGUMENTS:
            self._arguments += data
            return []
        channel = self._reasoning if self._place is Place.THINK else self._text
        return [*channel.push(data, logprob)]

    def finish(self) -> list[ChatDelta]:
        """What still waits when the generation is over; a message without an end is noted."""
        where = self._place.name.lower()
        self._drop_call("call_cut", kind="truncated")
        if not self._complete:
            self._note("truncated", where)
        return self._leave_text()

    def _go(self, place: Place) -> list[ChatDelta]:
        self._drop_call("call_not_closed")
        deltas = self._leave_text()
        self._place = place
        return deltas

    def _begin_call(self) -> list[ChatDelta]:
        self._drop_call("call_not_closed")
        deltas = self._leave_text()
        self._call_home, self._place = self._place, Place.CALL_ID
        return deltas

    def _begin_arguments(self) -> list[ChatDelta]:
        if self._place is not Place.CALL_ID:
            return self._stray(im_names.ARGUMENTS_BEGIN)
        self._place = Place.ARGUMENTS
        return []

    def _end_call(self) -> list[ChatDelta]:
        if self._place is Place.CALL_ID:
            self._drop_call("call_without_arguments")
            return []
        if self._place is not Place.ARGUMENTS:
            return self._stray(im_names.CALL_END)
        try:
            call_id, arguments = self._call_id.decode().strip(), self._arguments.decode()
            argument_json.parse_object(arguments)
        except ValueError:
            self._fault = self._fault or "arguments_not_json"
        else:
            if self._fault is None and call_id:
                return self._emit_call(call_id, arguments)
        self._drop_call("call_without_name")
        return []

    def _emit_call(self, call_id: str, arguments: str) -> list[ChatDelta]:
        index = self.num_calls
        name = self._tool_name(call_id, index)
        if self._call_home is Place.THINK:
            self._note("call_in_reasoning", name, call_index=index)
        self.num_calls += 1
        self._forget_call()
        return [ToolCallDelta(index=index, id=call_id, name=name, arguments=arguments)]

    def _tool_name(self, call_id: str, index: int) -> str:
        match = _CALL_ID.fullmatch(call_id)
        if match is not None:
            return match[1]
        match = _SANITISED_ID.fullmatch(call_id)
        if match is not None and match[1] in self._offered:
            self._note("repaired", "sanitised_id", call_id, call_index=index)
            return match[1]
        return call_id

    def _end_message(self) -> list[ChatDelta]:
        self._complete = True
        return self._go(Place.TEXT)

    def _drop_call(self, reason: str, kind: NoteKind = "malformed") -> None:
        if self._place in (Place.CALL_ID, Place.ARGUMENTS):
            raw = bytes(self._call_id + b" " + self._arguments).decode("utf-8", errors="replace")
            self._note(kind, self._fault or reason, raw)
            self._forget_call()

    def _forget_call(self) -> None:
        self._call_id.clear()
        self._arguments.clear()
        self._fault = None
        self._place = self._call_home

    def _stray(self, text: str) -> list[ChatDelta]:
        """A control token where it means nothing. In a call it could mean anything."""
        self._note("malformed", "stray_control", text)
        if self._place in (Place.CALL_ID, Place.ARGUMENTS):
            self._fault = self._fault or "stray_control"
        return []

    def _leave_text(self) -> list[ChatDelta]:
        return [*self._reasoning.flush(), *self._text.flush()]

    def _note(
        self, kind: NoteKind, reason: str, text: str = "", call_index: int | None = None
    ) -> None:
        self.notes.append(ParseNote(kind, reason, text, call_index))
