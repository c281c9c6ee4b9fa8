"""XTML, K3's chat encoding: a conversation as segments.

Order of a prompt: tools, thinking effort, messages, one-shot options, generation prompt. What
holds for the whole conversation stands first and what holds for one request stands last, so that
an option does not spoil a cached prefix.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from perilune.core.types import ImagePart, Message, ResponseFormat, ToolChoice
from perilune.text import xtml_options
from perilune.text.errors import TextError
from perilune.text.k3_names import MEDIA_BEGIN, MEDIA_CONTENT, MEDIA_END, MEDIA_PAD
from perilune.text.tokenizer import Segment
from perilune.text.xtml_calls import tools_channel
from perilune.text.xtml_markup import close_tag, end_message, open_tag, text_segment
from perilune.text.xtml_results import Turn, arrange

IMAGE_PLACEHOLDER = "<|kimi_image_placeholder|>"

ImageSizes = Iterator[tuple[int, int]]

_PLAIN_FORMAT = ResponseFormat()


def render(
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    tool_choice: ToolChoice = "auto",
    response_format: ResponseFormat = _PLAIN_FORMAT,
    thinking: bool = True,
    thinking_effort: str | None = None,
    generation_prompt: bool = True,
    image_sizes: Sequence[tuple[int, int]] = (),
    first_trained: int = 0,
) -> list[Segment]:
    """The segments of a prompt.

    `image_sizes` are the (width, height) of the images that the placeholder in a text stands for,
    in order; a placeholder beyond them is ordinary text. Assistant messages before
    `messages[first_trained]` are not trained.

    Raises:
        TextError: an image without a size, a tool result without a tool, a schema that is not JSON.
    """
    sizes = iter(image_sizes)
    segments = xtml_options.declare_tools(tools)
    segments += xtml_options.thinking_effort(thinking_effort if thinking else None)
    for turn in arrange(messages):
        trained = turn.message.role == "assistant" and turn.position >= first_trained
        segments += _message(turn, sizes, thinking=thinking, trained=trained)
    segments += xtml_options.tool_choice(tool_choice)
    segments += xtml_options.response_format(response_format)
    if generation_prompt:
        segments += open_tag("message", (("role", "assistant"),))
        segments += open_tag("think" if thinking else "response")
    return segments


def _message(turn: Turn, sizes: ImageSizes, *, thinking: bool, trained: bool) -> list[Segment]:
    message = turn.message
    head = open_tag("message", _head_attributes(turn))
    if message.role == "assistant":
        body = _assistant_body(turn, sizes, thinking=thinking, trained=trained)
        return head + body + end_message(trained=trained)
    content = _content(turn, sizes, trained=False)
    later_tools = xtml_options.declare_tools(message.tools, later=True)
    if later_tools and not content:
        return later_tools
    return head + content + end_message() + later_tools


def _head_attributes(turn: Turn) -> tuple[tuple[str, str], ...]:
    role = ("role", turn.message.role)
    if turn.tool_name is not None:
        return (role, ("tool", turn.tool_name), ("index", str(turn.index)))
    return (role, ("name", turn.message.name)) if turn.message.name else (role,)


def _assistant_body(
    turn: Turn, sizes: ImageSizes, *, thinking: bool, trained: bool
) -> list[Segment]:
    """Channels think, response, tools. With thinking every past turn has think, empty or not."""
    segments: list[Segment] = []
    if thinking:
        segments += open_tag("think")
        segments += text_segment(turn.message.reasoning or "", trained=trained)
        segments += close_tag("think", trained=trained)
    # The generation prompt opens the first channel; the model opens the others itself.
    segments += open_tag("response", trained=trained and thinking)
    segments += _content(turn, sizes, trained=trained)
    segments += close_tag("response", trained=trained)
    return segments + tools_channel(turn.message.tool_calls, trained=trained)


def _content(turn: Turn, sizes: ImageSizes, *, trained: bool) -> list[Segment]:
    segments: list[Segment] = []
    for part in turn.message.content:
        if isinstance(part, ImagePart):
            segments.append(_image_part(part, turn.position, sizes))
        else:
            segments += _text_with_placeholders(part.text, sizes, trained=trained)
    return segments


def _text_with_placeholders(text: str, sizes: ImageSizes, *, trained: bool) -> list[Segment]:
    before, found, after = text.partition(IMAGE_PLACEHOLDER)
    segments: list[Segment] = []
    while found and (size := next(sizes, None)) is not None:
        segments += [*text_segment(before, trained=trained), _image(*size)]
        before, found, after = after.partition(IMAGE_PLACEHOLDER)
    return segments + text_segment(before + found + after, trained=trained)


def _image_part(part: ImagePart, position: int, sizes: ImageSizes) -> Segment:
    if part.width is not None and part.height is not None:
        return _image(part.width, part.height)
    size = next(sizes, None)
    if size is None:
        raise TextError(
            f"messages[{position}] holds an image whose width and height are not known",
            param=f"messages[{position}].content",
        )
    return _image(*size)


def _image(width: int, height: int) -> Segment:
    """One pad; whoever embeds the image widens it to one position a merged patch."""
    markup = f"{MEDIA_BEGIN}image {width}x{height}{MEDIA_CONTENT}{MEDIA_PAD}{MEDIA_END}"
    return Segment(markup, True)
