"""Copying, spelling, reversing, counting, sorting and changing the case of words."""

from __future__ import annotations

import random
from importlib import resources

from perilune.train.synthetic.chat import Chat, exchange

WORDS = resources.files("perilune.train.synthetic").joinpath("words.txt").read_text("utf-8").split()


def listed(text: str) -> list[str]:
    """The words of a table that is written as running text."""
    return text.split()


def _some(rng: random.Random, low: int, high: int) -> list[str]:
    return rng.sample(WORDS, rng.randint(low, high))


def draw_copy(rng: random.Random) -> Chat:
    text = " ".join(_some(rng, 2, 9))
    question = rng.choice(
        ("Repeat after me: {t}", "Say exactly this: {t}", "Copy this text: {t}", "Repeat: {t}")
    )
    return exchange(question.format(t=text), text)


def draw_spelling(rng: random.Random) -> Chat:
    word = rng.choice(WORDS)
    question = rng.choice(
        ("Spell the word {w}.", "How do you spell {w}?", "Spell '{w}' letter by letter.")
    )
    return exchange(question.format(w=word), "-".join(word))


def draw_reverse(rng: random.Random) -> Chat:
    if rng.random() < 0.5:
        word = rng.choice(WORDS)
        question = rng.choice(
            ("Reverse the word {w}.", "Write '{w}' backwards.", "Spell {w} backwards.")
        )
        thought = "-".join(word) + " reversed: " + "-".join(word[::-1])
        return exchange(
            question.format(w=word), word[::-1], reasoning=thought if rng.random() < 0.6 else None
        )
    words = _some(rng, 3, 6)
    question = f"Reverse the order of these words: {' '.join(words)}"
    return exchange(question, " ".join(reversed(words)))


def draw_count(rng: random.Random) -> Chat:
    word = rng.choice(WORDS)
    if rng.random() < 0.4:
        question = rng.choice(("How many letters does '{w}' have?", "How many letters are in {w}?"))
        spelled = ", ".join(f"{c} {i}" for i, c in enumerate(word, start=1))
        return exchange(
            question.format(w=word),
            f"'{word}' has {len(word)} letters.",
            reasoning=spelled if rng.random() < 0.6 else None,
        )
    if rng.random() < 0.5:
        letter = rng.choice(word)
        num = word.count(letter)
        unit = "time" if num == 1 else "times"
        question = f"How many times does the letter {letter} appear in {word}?"
        return exchange(
            question,
            f"The letter {letter} appears {num} {unit} in {word}.",
            reasoning="-".join(word) if rng.random() < 0.6 else None,
        )
    words = _some(rng, 2, 10)
    return exchange(
        f"How many words are in this list: {', '.join(words)}?", f"There are {len(words)} words."
    )


def draw_case(rng: random.Random) -> Chat:
    text = " ".join(_some(rng, 1, 5))
    if rng.random() < 0.4:
        return exchange(f"Write this in capital letters: {text}", text.upper())
    if rng.random() < 0.5:
        return exchange(f"Write this in small letters: {text.upper()}", text)
    return exchange(f"Capitalise each word: {text}", text.title())


def draw_sort(rng: random.Random) -> Chat:
    words = _some(rng, 3, 6)
    listed = ", ".join(words)
    if rng.random() < 0.5:
        question = rng.choice(
            ("Sort these words alphabetically: {t}", "Put in alphabetical order: {t}")
        )
        return exchange(question.format(t=listed), ", ".join(sorted(words)))
    position = rng.randrange(3)
    name = ("first", "second", "third")[position]
    if rng.random() < 0.3:
        position, name = len(words) - 1, "last"
    return exchange(f"What is the {name} word in this list: {listed}?", words[position])


def draw_list(rng: random.Random) -> Chat:
    words = _some(rng, 3, 6)
    question = f"Make a numbered list of these words: {', '.join(words)}"
    return exchange(question, "\n".join(f"{i}. {word}" for i, word in enumerate(words, start=1)))
