"""Chat text: SmolLM2's conversations and chatterbot-corpus, filtered, as messages."""

from __future__ import annotations

import json
import lzma
import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from perilune.core.types import Message, TextPart
from perilune.train.archives import read_archive
from perilune.train.document import Conversation, Document, stable_hash
from perilune.train.synthetic.identity import greeting_turns

_ANSWERED_BY_PROGRAM = re.compile(
    r"^(hello|hi|how are you|who are you|what can you do|good morning)\b"
    r"|^what (day comes after|season comes after|is the capital of|language do people speak)"
    r"|^(how many (legs|days)|where is [A-Z]|what colou?r is an? )"
    r"|^(write a python function|show me python code|tell me a joke)",
    re.I,
)
"""Prompts whose answers the source model invents; the synthetic set answers them correctly."""
_ABOUT_ITSELF = re.compile(
    r"smollm|hugging ?face|openai|language model|as an ai|time.travel\w* assistant", re.I
)
_UNWANTED = re.compile(
    r"\b(sex(ual\w*)?|porn\w*|nude|naked|suicid\w*|rap(e|ed|ist)|nazi\w*)\b", re.I
)
_MAX_REPLIES = 10
_MIN_REPLY_CHARS = 12
_EFFORTS: tuple[Literal["low", "high", "max"], ...] = ("low", "high", "max")
_SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are perilune nano, a small and friendly assistant.",
    "You are a helpful, concise assistant.",
    "Answer the user's questions clearly.",
    "You are a friendly chat assistant. Keep your answers short.",
    "You are an assistant that explains things in simple words.",
)


def conversation(turns: Sequence[str], seed_text: str) -> Conversation:
    """Alternating user and assistant turns; mode and system prompt are drawn from the text's hash.

    Half of the conversations are in thinking mode with empty think channels, half without.
    """
    rng = random.Random(stable_hash(seed_text))
    roles = ("user", "assistant")
    messages = [
        Message(role=roles[i % 2], content=(TextPart(text=turn),)) for i, turn in enumerate(turns)
    ]
    if rng.random() < 0.08:
        messages = [*greeting_turns(rng).messages, *messages]
    if rng.random() < 0.12:
        system = TextPart(text=rng.choice(_SYSTEM_PROMPTS))
        messages.insert(0, Message(role="system", content=(system,)))
    thinking = rng.random() < 0.5
    effort = rng.choice(_EFFORTS) if thinking and rng.random() < 0.04 else None
    return Conversation(messages=tuple(messages), thinking=thinking, thinking_effort=effort)


def _windows(words: Sequence[str], size: int) -> list[tuple[str, ...]]:
    return [tuple(words[i : i + size]) for i in range(len(words) - size + 1)]


def without_loops(reply: str) -> str:
    """The reply up to the first sentence that mostly repeats what was said before it.

    The source model circles; a model trained on that circles more. Code is left alone.
    """
    if "```" in reply:
        return reply
    seen: set[tuple[str, ...]] = set()
    kept = []
    for sentence in re.split(r"(?<=[.!?])(?=\s)", reply):
        windows = _windows(re.findall(r"\w+", sentence.lower()), 4)
        if len(windows) > 1 and sum(window in seen for window in windows) > 0.4 * len(windows):
            break
        seen.update(windows)
        kept.append(sentence)
    return re.sub(r"\n+\s*(?:\d+\.|[-*])\s*$", "", "".join(kept)).rstrip()


def is_repetitive(text: str) -> bool:
    """True when more than a fifth of the three-word windows repeat an earlier one."""
    windows = _windows(text.split(), 3)
    return len(windows) > 12 and len(set(windows)) < 0.8 * len(windows)


def _is_wanted(turns: Sequence[str]) -> bool:
    replies = turns[1::2]
    return not (
        _ANSWERED_BY_PROGRAM.search(turns[0])
        or any(_ABOUT_ITSELF.search(reply) or _UNWANTED.search(reply) for reply in replies)
        or any(is_repetitive(reply) or len(reply) < _MIN_REPLY_CHARS for reply in replies)
    )


def read_chat_text(folder: Path) -> Iterator[Document]:
    """`smol_chat_*.jsonl.xz`, a JSON list of alternating turns a line; few replies per prompt."""
    counts: Counter[str] = Counter()
    for file in sorted(folder.glob("smol_chat_*.jsonl.xz")):
        with lzma.open(file, "rt", encoding="utf-8", newline="\n") as lines:
            for line in lines:
                turns = json.loads(line)
                prompt = turns[0]
                turns = [turns[0], *map(without_loops, turns[1:])]
                if counts[prompt] >= _MAX_REPLIES or not _is_wanted(turns):
                    continue
                counts[prompt] += 1
                yield Document(
                    kind="chat",
                    source="smollm2-chat",
                    conversation=conversation(turns, line),
                    split_key=prompt,
                )


_TOPICS = "computers conversations food history literature money movies science sports trivia"
_TOPICS += " tech_support coding"


def read_chatterbot(path: Path) -> Iterator[Document]:
    """The English question-answer files of harmless topics."""
    wanted = {f"chatterbot_corpus/data/english/{topic}.yml" for topic in _TOPICS.split()}
    for file in read_archive(path, wanted.__contains__):
        for turns in _parse_dialogs(file.data.decode("utf-8")):
            if len(turns) >= 2 and not any(_ABOUT_ITSELF.search(turn) for turn in turns):
                turns = turns[: len(turns) // 2 * 2]
                yield Document(
                    kind="chat",
                    source="chatterbot-corpus",
                    conversation=conversation(turns, "\n".join(turns)),
                    split_key=turns[0],
                )


def _parse_dialogs(yaml: str) -> Iterator[list[str]]:
    """The `conversations` list of one file: plain, quoted, folded and `|` block scalars only."""
    turns: list[str] = []
    lines: list[str] = []
    body = yaml.split("conversations:", 1)[-1]
    for line in [*body.splitlines(), "- - end"]:
        match = re.match(r"^(\s*)(- - |  - )(.*)$", line)
        if match is None:
            lines.append(line)
            continue
        if lines:
            turns.append(_scalar(lines))
        if match[2] == "- - " and turns:
            yield turns
            turns = []
        lines = [match[3]]


def _scalar(lines: list[str]) -> str:
    first = lines[0].strip()
    if first in ("|", "|-", "|+"):
        indent = min((len(s) - len(s.lstrip()) for s in lines[1:] if s.strip()), default=0)
        return "\n".join(line[indent:].rstrip() for line in lines[1:]).strip()
    text = " ".join(part.strip() for part in lines if part.strip())
    if len(text) > 1 and text[0] in "'\"" and text[-1] == text[0]:
        quote = text[0]
        text = text[1:-1].replace("''", "'") if quote == "'" else text[1:-1].replace('\\"', '"')
    return text
