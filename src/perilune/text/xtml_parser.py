"""Streaming parser of K3's output, on token ids.

Only the ids of control tokens are structure. The same characters spelt with ordinary ids, in an
argument or anywhere else, are data; text alone could not tell the two apart.
"""

from __future__ import annotations

from enum import Enum, auto

from perilune.core.types import ReasoningDelta, TextDelta, TextLogprob, ToolCallDelta
from perilune.text import k3_names
from perilune.text.channel_text import ChannelText
from perilune.text.chat import ChatDelta, NoteKind, ParseNote, new_call_id
from perilune.text.errors import TextError
from perilune.text.tokenizer import Tokenizer
from perilune.text.xtml_call_buffer import CallBuffer
from perilune.text.xtml_tag import Tag, TagReader


class Place(Enum):
    """Where in the message the next token stands."""

    THINK = auto()
    RESPONSE = auto()
    TOOLS = auto()
    CALL = auto()
    ARGUMENT = auto()
    BODY = auto()
    """Between the channels of a message."""


_CHANNELS = {"think": Place.THINK, "response": Place.RESPONSE, "tools": Place.TOOLS}


class XtmlParser:
    """Ids of one generated message to deltas. The prompt has opened think, or response.

    Text between the channels counts as response text. A call comes out when it is closed and
    well formed; otherwise its raw text is kept in `notes`. Time is linear in the input.
    """

    def __init__(self, tokenizer: Tokenizer, *, thinking: bool = True) -> None:
        names = tokenizer.special_ids
        self._tokenizer = tokenizer
        self._control = tokenizer.control_ids
        self._open, self._close = names[k3_names.OPEN], names[k3_names.CLOSE]
        self._sep = names[k3_names.SEP]
        self._ends = tokenizer.eos_ids | {names[k3_names.END_OF_MSG]}
        self._place = Place.THINK if thinking else Place.RESPONSE
        self._reasoning, self._text = ChannelText(ReasoningDelta), ChannelText(TextDelta)
        self._tag: TagReader | None = None
        self._call: CallBuffer | None = None
        self._call_home = Place.TOOLS
        self._complete = False
        self.notes: list[ParseNote] = []
        self.num_calls = 0
        self.reasoning_tokens = 0

    def feed(self, token_id: int, logprob: TextLogprob | None = None) -> list[ChatDelta]:
        """Deltas that this token completes; see `ChatParser.feed`."""
        self.reasoning_tokens += self._place is Place.THINK
        try:
            data = self._tokenizer.token_bytes(token_id)
        except TextError as error:
            # An embedding may have more rows than the tokenizer has tokens.
            self._stray(str(error))
            return []
        if self._call is not None:
            self._call.raw += data
        if token_id not in self._control and token_id not in self._ends:
            return self._on_data(data, logprob)
        if token_id == self._sep and self._tag is not None:
            return self._on_tag_end(self._tag)
        self._abandon_tag()
        if token_id in self._ends:
            return self._end_message()
        if token_id in (self._open, self._close):
            among_calls = self._place in (Place.TOOLS, Place.CALL, Place.ARGUMENT)
            self._tag = TagReader(closing=token_id == self._close, among_calls=among_calls)
            return []
        self._stray(data.decode("utf-8", errors="replace"))
        return []

    def finish(self) -> list[ChatDelta]:
        """What still waits when the generation is over; a message without an end is noted."""
        cut = self._call is not None or self._tag is not None or not self._complete
        if self._tag is not None and self._call is None:
            self._note("truncated", "tag", self._tag.text)
        self._tag = None
        self._drop_call("call_cut", kind="truncated")
        if cut:
            self._note("truncated", self._place.name.lower())
        return self._leave_text()

    def _on_data(self, data: bytes, logprob: TextLogprob | None) -> list[ChatDelta]:
        if self._tag is None:
            return self._on_text(data, logprob)
        if self._tag.push(data, logprob):
            return []
        tokens, self._tag = self._tag.tokens, None
        self._stray("")
        return [delta for token in tokens for delta in self._on_text(token.data, token.logprob)]

    def _on_text(self, data: bytes, logprob: TextLogprob | None) -> list[ChatDelta]:
        if self._call is not None:
            if self._place is Place.ARGUMENT:
                self._call.push(data)
            else:
                self._call.fail("text_in_call")
            return []
        channel = self._reasoning if self._place is Place.THINK else self._text
        return [*channel.push(data, logprob)]

    def _on_tag_end(self, reader: TagReader) -> list[ChatDelta]:
        self._tag = None
        tag = reader.finish()
        if tag is None:
            self._stray("")
            return [d for token in reader.tokens for d in self._on_text(token.data, token.logprob)]
        return self._on_close(tag) if tag.closing else self._on_open(tag)

    def _on_open(self, tag: Tag) -> list[ChatDelta]:
        if tag.name == "argument" and self._call is not None:
            if self._place is Place.ARGUMENT:
                self._call.fail("argument_not_closed")
            self._call.open_argument(tag)
            self._place = Place.ARGUMENT
            return []
        if tag.name in ("argument", "json"):
            self._stray(tag.name)
            return []
        self._drop_call("call_not_closed")
        deltas = self._leave_text()
        if tag.name == "call":
            self._call_home, self._place = self._place, Place.CALL
            self._call = CallBuffer(tag)
            return deltas
        if self._place is Place.THINK and tag.name != "think":
            self._note("repaired", "think_not_closed")
        self._place = _CHANNELS.get(tag.name, Place.BODY)
        return deltas

    def _on_close(self, tag: Tag) -> list[ChatDelta]:
        if tag.name == "argument" and self._call is not None and self._place is Place.ARGUMENT:
            self._call.close_argument()
            self._place = Place.CALL
            return []
        if tag.name == "call" and self._call is not None:
            return self._end_call(self._call)
        if tag.name == "message":
            return self._end_message()
        if tag.name in _CHANNELS:
            self._drop_call("call_not_closed")
        if self._place is not _CHANNELS.get(tag.name):
            self._stray(tag.name)
            return []
        self._place = Place.BODY
        return self._leave_text()

    def _end_call(self, call: CallBuffer) -> list[ChatDelta]:
        if self._place is Place.ARGUMENT:
            call.fail("argument_not_closed")
        if call.fault is not None:
            self._drop_call(call.fault)
            return []
        index = self.num_calls
        if self._call_home is Place.THINK:
            self._note("call_in_reasoning", call.name, call_index=index)
        elif self._call_home is not Place.TOOLS:
            self._note("repaired", "call_outside_tools", call_index=index)
        self.num_calls += 1
        self._call, self._place = None, self._call_home
        return [
            ToolCallDelta(index=index, id=new_call_id(), name=call.name, arguments=call.arguments())
        ]

    def _end_message(self) -> list[ChatDelta]:
        self._drop_call("call_not_closed")
        if self._place is Place.THINK:
            self._note("malformed", "think_not_closed")
        self._place = Place.BODY
        self._complete = True
        return self._leave_text()

    def _drop_call(self, reason: str, kind: NoteKind = "malformed") -> None:
        """Sets an open call aside; the parser goes on where the call began."""
        if self._call is not None:
            raw = self._call.raw.decode("utf-8", errors="replace")
            self._note(kind, self._call.fault or reason, raw)
            self._call, self._place = None, self._call_home

    def _leave_text(self) -> list[ChatDelta]:
        return [*self._reasoning.flush(), *self._text.flush()]

    def _abandon_tag(self) -> None:
        """A control token in the middle of a tag: the tag is no tag."""
        if self._tag is not None:
            text, self._tag = self._tag.text, None
            self._stray(text)

    def _stray(self, text: str) -> None:
        """A control token where it means nothing. In a call it could mean anything."""
        self._note("malformed", "stray_control", text)
        if self._call is not None:
            self._call.fail("stray_control")

    def _note(
        self, kind: NoteKind, reason: str, text: str = "", call_index: int | None = None
    ) -> None:
        self.notes.append(ParseNote(kind, reason, text, call_index))
