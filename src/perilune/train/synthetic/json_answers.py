"""Answers in JSON: values taken from a sentence, with and without a schema in the request."""

from __future__ import annotations

import json
import random
from typing import Any

from perilune.core.types import ResponseFormat
from perilune.train.synthetic.chat import Chat, assistant, user
from perilune.train.synthetic.recall import CITIES, COLOURS, JOBS, NAMES
from perilune.train.synthetic.words import WORDS

_TYPES = {str: "string", int: "integer", bool: "boolean"}


def _record(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """A sentence and what it says."""
    kind = rng.randrange(4)
    if kind == 0:
        name, age, city = rng.choice(NAMES), rng.randint(5, 90), rng.choice(CITIES)
        return f"{name} is {age} years old and lives in {city}.", {
            "name": name,
            "age": age,
            "city": city,
        }
    if kind == 1:
        item, price, stock = rng.choice(WORDS), rng.randint(1, 99), rng.random() < 0.5
        state = "is in stock" if stock else "is sold out"
        sentence = f"The {item} costs {price} dollars and {state}."
        return sentence, {"item": item, "price": price, "in_stock": stock}
    if kind == 2:
        name, job, colour = rng.choice(NAMES), rng.choice(JOBS), rng.choice(COLOURS)
        sentence = f"{name} works as a {job} and likes {colour}."
        return sentence, {"name": name, "job": job, "colour": colour}
    city, high, low = rng.choice(CITIES), rng.randint(10, 35), rng.randint(-5, 9)
    sentence = f"In {city} the high is {high} degrees and the low is {low}."
    return sentence, {"city": city, "high": high, "low": low}


def draw_json(rng: random.Random) -> Chat:
    sentence, record = _record(rng)
    keys = ", ".join(record)
    question = rng.choice(
        (
            f"Extract {keys} as JSON: {sentence}",
            f"{sentence}\nGive me a JSON object with the keys {keys}.",
            f"Turn this into JSON with {keys}.\n\n{sentence}",
        )
    )
    response_format = rng.choice(
        (ResponseFormat(), ResponseFormat(type="json_object"), _schema_format(record))
    )
    answer = json.dumps(record, ensure_ascii=False)
    return Chat((user(question), assistant(answer)), response_format=response_format)


def _schema_format(record: dict[str, Any]) -> ResponseFormat:
    properties = {key: {"type": _TYPES[type(value)]} for key, value in record.items()}
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(record),
        "additionalProperties": False,
    }
    return ResponseFormat(type="json_schema", schema=schema)
