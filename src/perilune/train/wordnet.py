"""WordNet: glosses as a dictionary, and questions about common words with the gloss as answer."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from perilune.core.types import Message, TextPart
from perilune.train.archives import read_archive
from perilune.train.document import Conversation, Document, stable_hash

_POS = {"n": "noun", "v": "verb", "a": "adjective", "s": "adjective", "r": "adverb"}
_NUM_ENTRIES = 40
_QUESTIONS = (
    "What does the word '{w}' mean?",
    "What does '{w}' mean?",
    "Define '{w}'.",
    "Can you explain the word {w}?",
    "What is the meaning of {w}?",
    "Give me a short definition of {w}.",
)


class Gloss(NamedTuple):
    words: tuple[str, ...]
    pos: str
    meaning: str
    examples: tuple[str, ...]


def parse_line(line: str) -> Gloss | None:
    """One line of a `data.*` file (wndb(5WN)); None for the licence header and odd glosses."""
    head, _, gloss = line.partition(" | ")
    fields = head.split()
    if not gloss or len(fields) < 6:
        return None
    num_words = int(fields[3], 16)
    words = [re.sub(r"\(\w+\)$", "", fields[4 + 2 * i]).replace("_", " ") for i in range(num_words)]
    examples = tuple(re.findall(r'"([^"]+)"', gloss))
    meaning = re.sub(r'[;:]?\s*"[^"]*"', "", gloss).strip().strip(";").strip()
    return Gloss(tuple(words), _POS[fields[2]], meaning, examples) if meaning else None


def read_glosses(path: Path) -> Iterator[Document]:
    """Dictionary pages in file order, then one conversation for each common word."""
    glosses: list[Gloss] = []
    counts: dict[str, int] = {}
    for file in read_archive(path, lambda name: "/wordnet/" in name):
        name = file.path.rsplit("/", 1)[1]
        if name.startswith("data."):
            parsed = map(parse_line, file.data.decode("utf-8").splitlines())
            glosses += [gloss for gloss in parsed if gloss is not None]
        elif name == "cntlist.rev":
            for line in file.data.decode("ascii").splitlines():
                key, _, count = line.split()
                word = key.split("%")[0]
                counts[word] = counts.get(word, 0) + int(count)
    common = [gloss for gloss in glosses if not gloss.words[0][0].isupper()]
    for start in range(0, len(common), _NUM_ENTRIES):
        page = "".join(map(_entry, common[start : start + _NUM_ENTRIES]))
        yield Document(kind="prose", source="wordnet-base", text=page)
    yield from _conversations(glosses, counts)


def _entry(gloss: Gloss) -> str:
    examples = "".join(f' "{example}"' for example in gloss.examples[:2])
    return f"{', '.join(gloss.words[:3])} ({gloss.pos}): {gloss.meaning}.{examples}\n"


def _conversations(glosses: list[Gloss], counts: dict[str, int]) -> Iterator[Document]:
    """One sense a word; data files do not order senses, so one with an example is taken."""
    best: dict[str, Gloss] = {}
    for gloss in glosses:
        word = gloss.words[0]
        if word.isalpha() and word.islower() and counts.get(word, 0) >= 1:
            held = best.get(word)
            if held is None or (gloss.examples and not held.examples):
                best[word] = gloss
    for word, gloss in best.items():
        rng = random.Random(stable_hash(word))
        article = "an" if gloss.pos[0] == "a" else "a"
        answer = f"'{word.capitalize()}' is {article} {gloss.pos} that means: {gloss.meaning}."
        if gloss.examples:
            answer += f' For example: "{gloss.examples[0]}."'
        if len(gloss.words) > 1:
            answer += f" A similar word is '{gloss.words[1]}'."
        question = rng.choice(_QUESTIONS).format(w=word)
        messages = (
            Message(role="user", content=(TextPart(text=question),)),
            Message(role="assistant", content=(TextPart(text=answer),)),
        )
        yield Document(
            kind="chat",
            source="wordnet-base",
            conversation=Conversation(messages=messages, thinking=rng.random() < 0.5),
            split_key=question,
        )
