"""A few hundred simple facts from small tables, asked in several ways."""

from __future__ import annotations

import random
from functools import cache
from importlib import resources

from perilune.train.synthetic.chat import Chat, exchange
from perilune.train.synthetic.words import listed

_DAYS = listed("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
_MONTHS = listed(
    "January February March April May June July August September October November December"
)
_MONTH_DAYS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
_SEASONS = ["spring", "summer", "autumn", "winter"]
_OPPOSITES = (
    "hot cold|big small|up down|fast slow|old young|happy sad|open closed|light dark|"
    "high low|wet dry|full empty|hard soft|early late|rich poor|strong weak|near far|"
    "loud quiet|clean dirty|left right|day night|good bad|long short|thick thin|"
    "sweet sour|first last|true false|buy sell|begin end|push pull|win lose|laugh cry|"
    "arrive leave|remember forget|give take"
)
_PLURALS = (
    "cat cats|dog dogs|box boxes|child children|man men|woman women|foot feet|"
    "tooth teeth|mouse mice|city cities|baby babies|leaf leaves|knife knives|"
    "sheep sheep|fish fish|bus buses|glass glasses|goose geese|story stories|"
    "potato potatoes|wolf wolves|book books|person people|watch watches"
)
_PASTS = (
    "go went|see saw|eat ate|run ran|write wrote|take took|give gave|come came|"
    "make made|buy bought|think thought|bring brought|find found|know knew|swim swam|"
    "sing sang|drink drank|speak spoke|walk walked|play played|try tried|sleep slept|"
    "teach taught|read read|begin began|fly flew"
)


@cache
def _rows(table: str) -> list[list[str]]:
    """Lines of `<table>.txt`, cut at the bars."""
    text = resources.files("perilune.train.synthetic").joinpath(f"{table}.txt").read_text("utf-8")
    return [line.split("|") for line in text.splitlines()]


def draw_country(rng: random.Random) -> Chat:
    name, capital, continent, language = rng.choice(_rows("countries"))
    title = name[0].upper() + name[1:]
    return rng.choice(
        (
            exchange(f"What is the capital of {name}?", f"The capital of {name} is {capital}."),
            exchange(
                f"Which city is the capital of {name}?", f"{capital} is the capital of {name}."
            ),
            exchange(
                f"What language do people speak in {name}?", f"In {name} people speak {language}."
            ),
            exchange(f"Where is {name}?", f"{title} is in {continent}."),
            exchange(
                f"{capital} is the capital of which country?",
                f"{capital} is the capital of {name}.",
            ),
        )
    )


def draw_animal(rng: random.Random) -> Chat:
    name, food, home, legs, sound = rng.choice(_rows("animals"))
    a = "an" if name[0] in "aeiou" else "a"
    title = f"{a} {name}".capitalize()
    number = "no legs" if legs == "0" else f"{legs} legs"
    choices = [
        exchange(f"What does {a} {name} eat?", f"{title} eats {food}."),
        exchange(f"Where does {a} {name} live?", f"{title} lives {home}."),
        exchange(f"How many legs does {a} {name} have?", f"{title} has {number}."),
    ]
    if sound:
        choices.append(
            exchange(
                f"What sound does {a} {name} make?", f"The sound of {a} {name} is called: {sound}."
            )
        )
    return rng.choice(choices)


def _neighbour(rng: random.Random, unit: str, names: list[str]) -> Chat:
    i, step = rng.randrange(len(names)), rng.choice((1, -1))
    word = "after" if step == 1 else "before"
    other = names[(i + step) % len(names)]
    title = other[0].upper() + other[1:]
    return exchange(f"What {unit} comes {word} {names[i]}?", f"{title} comes {word} {names[i]}.")


def draw_calendar(rng: random.Random) -> Chat:
    kind = rng.randrange(4)
    if kind == 0:
        return _neighbour(rng, "day", _DAYS)
    if kind == 1:
        return _neighbour(rng, "month", _MONTHS)
    if kind == 2:
        return _neighbour(rng, "season", _SEASONS)
    i = rng.randrange(12)
    days = f"{_MONTH_DAYS[i]} days" + (", and 29 in a leap year" if i == 1 else "")
    return exchange(f"How many days does {_MONTHS[i]} have?", f"{_MONTHS[i]} has {days}.")


def _pair(rng: random.Random, table: str) -> tuple[str, str]:
    first, second = rng.choice(table.split("|")).split()
    return first, second


def draw_grammar(rng: random.Random) -> Chat:
    kind = rng.randrange(3)
    if kind == 0:
        pair = list(_pair(rng, _OPPOSITES))
        rng.shuffle(pair)
        return exchange(
            f"What is the opposite of {pair[0]}?", f"The opposite of {pair[0]} is {pair[1]}."
        )
    if kind == 1:
        one, many = _pair(rng, _PLURALS)
        return exchange(f"What is the plural of {one}?", f"The plural of {one} is {many}.")
    now, past = _pair(rng, _PASTS)
    return exchange(f"What is the past tense of {now}?", f"The past tense of {now} is {past}.")


def draw_simple(rng: random.Random) -> Chat:
    question, answer = rng.choice(_rows("answers"))
    return exchange(question, answer)
