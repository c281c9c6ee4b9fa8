"""Sums, differences, products, quotients and comparisons of small numbers, some with steps."""

from __future__ import annotations

import random

from perilune.train.synthetic.chat import Chat, exchange
from perilune.train.synthetic.words import listed

_ASK = ("What is {e}?", "{e} = ?", "Calculate {e}.", "How much is {e}?", "Compute {e}", "{e}")
_WORDS = {"+": "plus", "-": "minus", "*": "times", "/": "divided by"}
_ITEMS = listed(
    "apples books coins stones cards pencils eggs shells buttons marbles stamps tickets"
)
_NAMES = listed("Anna Ben Clara David Emma Felix Grace Hugo Iris Jack Kate Leo Mia Noah Olga Paul")


def _operands(rng: random.Random, sign: str) -> tuple[int, int]:
    top = rng.choice((10, 10, 20, 20, 50, 100, 100, 100, 1000))
    if sign == "+":
        return rng.randint(0, top), rng.randint(0, top)
    if sign == "-":
        a = rng.randint(0, top)
        return a, rng.randint(0, a)
    if sign == "*":
        return (
            (rng.randint(0, 12), rng.randint(0, 12))
            if rng.random() < 0.8
            else (rng.randint(2, 9), rng.randint(11, 99))
        )
    b = rng.randint(1, 12)
    return b * rng.randint(0, 12), b


def evaluate(a: int, sign: str, b: int) -> int:
    """The exact value; quotients are drawn to be whole."""
    if sign == "/":
        return a // b
    return {"+": a + b, "-": a - b, "*": a * b}[sign]


def steps(a: int, sign: str, b: int) -> str:
    """A short worked line: tens and ones apart."""
    value = evaluate(a, sign, b)
    if sign == "+" and a >= 10 and b >= 10:
        tens, ones = a - a % 10 + b - b % 10, a % 10 + b % 10
        return (
            f"{a - a % 10} + {b - b % 10} = {tens}. {a % 10} + {b % 10} = {ones}. "
            f"{tens} + {ones} = {value}."
        )
    if sign == "-" and b >= 10:
        middle = a - (b - b % 10)
        return f"{a} - {b - b % 10} = {middle}. {middle} - {b % 10} = {value}."
    if sign == "*" and max(a, b) >= 11:
        small, large = sorted((a, b))
        return (
            f"{small} * {large - large % 10} = {small * (large - large % 10)}. "
            f"{small} * {large % 10} = {small * (large % 10)}. The sum is {value}."
        )
    return f"{a} {sign} {b} = {value}."


def draw_sum(rng: random.Random) -> Chat:
    sign = rng.choice("++--**/")
    a, b = _operands(rng, sign)
    value = evaluate(a, sign, b)
    expression = f"{a} {sign} {b}" if rng.random() < 0.5 else f"{a} {_WORDS[sign]} {b}"
    question = rng.choice(_ASK).format(e=expression)
    answer = rng.choice(
        (
            f"{a} {sign} {b} = {value}",
            f"{value}",
            f"The answer is {value}.",
            f"{expression} is {value}.",
        )
    )
    return exchange(question, answer, reasoning=steps(a, sign, b) if rng.random() < 0.4 else None)


def draw_story(rng: random.Random) -> Chat:
    name, item = rng.choice(_NAMES), rng.choice(_ITEMS)
    a, b = rng.randint(2, 60), rng.randint(1, 40)
    kind = rng.randrange(3)
    if kind == 0:
        question = f"{name} has {a} {item} and gets {b} more. How many {item} does {name} have now?"
        sign = "+"
    elif kind == 1:
        a, b = max(a, b), min(a, b)
        question = f"{name} had {a} {item} and gave away {b}. How many {item} are left?"
        sign = "-"
    else:
        a, b = rng.randint(2, 12), rng.randint(2, 12)
        question = f"{name} fills {a} boxes with {b} {item} each. How many {item} is that in total?"
        sign = "*"
    value = evaluate(a, sign, b)
    answer = f"{a} {sign} {b} = {value}. The answer is {value} {item}."
    return exchange(question, answer, reasoning=steps(a, sign, b) if rng.random() < 0.5 else None)


def draw_comparison(rng: random.Random) -> Chat:
    a, b = rng.sample(range(200), 2)
    if rng.random() < 0.5:
        question, value = f"Which number is larger, {a} or {b}?", max(a, b)
        return exchange(question, f"{value} is larger than {min(a, b)}.")
    if rng.random() < 0.5:
        return exchange(f"Is {a} an even number?", _parity(a))
    numbers = rng.sample(range(100), rng.randint(3, 6))
    listed = ", ".join(map(str, numbers))
    ordered = ", ".join(map(str, sorted(numbers)))
    return exchange(f"Sort these numbers from smallest to largest: {listed}", ordered)


def _parity(a: int) -> str:
    return f"Yes, {a} is even." if a % 2 == 0 else f"No, {a} is odd."
