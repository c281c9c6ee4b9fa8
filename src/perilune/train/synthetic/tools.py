"""Tool use: declared functions, the call that answers a question, its result and the reply."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from perilune.core.types import Message, ToolCall
from perilune.train.synthetic.chat import Chat, assistant, tool_result, user
from perilune.train.synthetic.recall import CITIES, NAMES
from perilune.train.synthetic.words import WORDS


class Use(NamedTuple):
    """One question that a tool answers."""

    question: str
    arguments: dict[str, Any]
    result: str
    answer: str


class Tool(NamedTuple):
    names: tuple[str, ...]
    description: str
    properties: dict[str, dict[str, Any]]
    required: tuple[str, ...]
    draw: Callable[[random.Random], Use]


def _weather(rng: random.Random) -> Use:
    city, degrees = rng.choice(CITIES), rng.randint(-5, 38)
    sky = rng.choice(("sunny", "cloudy", "rainy", "windy", "clear", "foggy"))
    question = rng.choice(
        (
            "What is the weather in {c}?",
            "How is the weather in {c} today?",
            "Weather in {c}?",
            "Is it warm in {c} right now?",
            "Tell me the weather in {c}.",
        )
    ).format(c=city)
    result = rng.choice((f"{degrees}C, {sky}", json.dumps({"temperature": degrees, "sky": sky})))
    return Use(question, {"city": city}, result, f"It is {degrees} degrees and {sky} in {city}.")


def _add(rng: random.Random) -> Use:
    a, b = rng.randint(10, 9999), rng.randint(10, 9999)
    question = rng.choice(
        ("What is {a} + {b}?", "Add {a} and {b}.", "Use the tool to add {a} and {b}.")
    )
    text = question.format(a=a, b=b)
    return Use(text, {"a": a, "b": b}, str(a + b), f"{a} + {b} = {a + b}")


def _calculate(rng: random.Random) -> Use:
    a, b, c = rng.randint(2, 999), rng.randint(2, 99), rng.randint(2, 50)
    expression, value = rng.choice(
        (
            (f"{a} * {b}", a * b),
            (f"{a} + {b} * {c}", a + b * c),
            (f"({a} + {b}) * {c}", (a + b) * c),
        )
    )
    question = rng.choice(("Calculate {e}.", "What is {e}?", "Compute {e} with the calculator."))
    return Use(
        question.format(e=expression),
        {"expression": expression},
        str(value),
        f"The result is {value}.",
    )


def _time(rng: random.Random) -> Use:
    city, clock = rng.choice(CITIES), f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}"
    question = rng.choice(
        ("What time is it in {c}?", "Tell me the time in {c}.", "Current time in {c}?")
    )
    return Use(question.format(c=city), {"city": city}, clock, f"It is {clock} in {city}.")


def _search(rng: random.Random) -> Use:
    word, num = rng.choice(WORDS), rng.randint(2, 99)
    question = rng.choice(
        ("Search the web for {w}.", "Find pages about {w}.", "Look up {w} online.")
    ).format(w=word)
    result = f"{num} results. First: All about {word}"
    return Use(
        question,
        {"query": word},
        result,
        f'I found {num} results. The first is "All about {word}".',
    )


def _email(rng: random.Random) -> Use:
    name, word = rng.choice(NAMES), rng.choice(WORDS)
    text = f"The {word} is ready."
    question = f'Send an email to {name} that says "{text}"'
    return Use(question, {"to": name, "text": text}, "sent", f"I sent the email to {name}.")


def _reminder(rng: random.Random) -> Use:
    word, minutes = rng.choice(WORDS), rng.choice((5, 10, 15, 20, 30, 45, 60, 90))
    question = f"Remind me in {minutes} minutes to check the {word}."
    answer = f"I will remind you in {minutes} minutes to check the {word}."
    return Use(question, {"minutes": minutes, "text": f"check the {word}"}, "ok", answer)


def _price(rng: random.Random) -> Use:
    item, price = rng.choice(WORDS), rng.randint(1, 500)
    question = rng.choice(("How much does the {i} cost?", "What is the price of a {i}?")).format(
        i=item
    )
    return Use(
        question, {"item": item}, json.dumps({"price": price}), f"The {item} costs {price} dollars."
    )


def _light(rng: random.Random) -> Use:
    room, on = rng.choice(("kitchen", "bedroom", "garden", "hall", "office")), rng.random() < 0.5
    word = "on" if on else "off"
    return Use(
        f"Turn {word} the light in the {room}.",
        {"room": room, "on": on},
        "done",
        f"The light in the {room} is now {word}.",
    )


def _contact(rng: random.Random) -> Use:
    name, number = rng.choice(NAMES), f"555-{rng.randint(0, 9999):04}"
    question = rng.choice(("What is {n}'s phone number?", "Find the number of {n}.")).format(n=name)
    return Use(question, {"name": name}, number, f"{name}'s phone number is {number}.")


def _read(rng: random.Random) -> Use:
    path = f"{rng.choice(WORDS)}.{rng.choice(('txt', 'md', 'py'))}"
    word = rng.choice(WORDS)
    question = rng.choice(
        ("What is in the file {p}?", "Read {p}.", "Open {p} and tell me what it says.")
    )
    return Use(
        question.format(p=path),
        {"path": path},
        f"The {word} is here.",
        f"The file {path} says: The {word} is here.",
    )


def _sum_list(rng: random.Random) -> Use:
    numbers = [rng.randint(1, 99) for _ in range(rng.randint(3, 6))]
    listed = ", ".join(map(str, numbers))
    total = sum(numbers)
    return Use(
        f"Add up these numbers: {listed}", {"numbers": numbers}, str(total), f"The sum is {total}."
    )


def _text(description: str) -> dict[str, Any]:
    return {"type": "string", "description": description}


def _number(description: str) -> dict[str, Any]:
    return {"type": "integer", "description": description}


TOOLS: tuple[Tool, ...] = (
    Tool(
        ("get_weather", "weather", "current_weather"),
        "Current weather for a city.",
        {"city": _text("City name")},
        ("city",),
        _weather,
    ),
    Tool(
        ("add", "add_numbers"),
        "Add two numbers.",
        {"a": _number("First number"), "b": _number("Second number")},
        ("a", "b"),
        _add,
    ),
    Tool(
        ("calculator", "calculate", "eval_math"),
        "Evaluate an arithmetic expression.",
        {"expression": _text("The expression")},
        ("expression",),
        _calculate,
    ),
    Tool(
        ("get_time", "current_time", "clock"),
        "Current local time in a city.",
        {"city": _text("City name")},
        ("city",),
        _time,
    ),
    Tool(
        ("search", "web_search"),
        "Search the web.",
        {"query": _text("Search words")},
        ("query",),
        _search,
    ),
    Tool(
        ("send_email", "send_message"),
        "Send a message to a person.",
        {"to": _text("Name"), "text": _text("The message")},
        ("to", "text"),
        _email,
    ),
    Tool(
        ("set_reminder", "remind"),
        "Set a reminder.",
        {"minutes": _number("Minutes from now"), "text": _text("What to do")},
        ("minutes", "text"),
        _reminder,
    ),
    Tool(
        ("get_price", "price_of"),
        "Price of an item in dollars.",
        {"item": _text("Item name")},
        ("item",),
        _price,
    ),
    Tool(
        ("set_light", "switch_light"),
        "Switch a light on or off.",
        {"room": _text("Room"), "on": {"type": "boolean"}},
        ("room", "on"),
        _light,
    ),
    Tool(
        ("find_contact", "phone_number"),
        "Phone number of a person.",
        {"name": _text("Name")},
        ("name",),
        _contact,
    ),
    Tool(
        ("read_file", "open_file"),
        "Read a text file.",
        {"path": _text("Path of the file")},
        ("path",),
        _read,
    ),
    Tool(
        ("sum_list", "sum_numbers"),
        "Add up a list of numbers.",
        {"numbers": {"type": "array", "items": {"type": "number"}}},
        ("numbers",),
        _sum_list,
    ),
)


def _declaration(tool: Tool, name: str) -> Mapping[str, Any]:
    parameters = {"type": "object", "properties": tool.properties, "required": list(tool.required)}
    function = {"name": name, "description": tool.description, "parameters": parameters}
    return {"type": "function", "function": function}


def _round(rng: random.Random, tool: Tool, name: str, first_id: int) -> list[Message]:
    """Question, call, result and reply; now and then two calls at once."""
    uses = [tool.draw(rng)]
    if tool.draw in (_weather, _time, _price) and rng.random() < 0.15:
        uses.append(tool.draw(rng))
    question = " ".join(use.question for use in uses)
    calls = tuple(
        ToolCall(id=f"call_{first_id + i}", name=name, arguments=json.dumps(use.arguments))
        for i, use in enumerate(uses)
    )
    thought = rng.choice(
        (None, None, None, f"I should call {name}.", f"The tool {name} can answer this.")
    )
    results = [tool_result(use.result, call.id) for use, call in zip(uses, calls, strict=True)]
    answer = " ".join(use.answer for use in uses)
    return [
        user(question),
        assistant("", reasoning=thought, calls=calls),
        *results,
        assistant(answer),
    ]


def draw_tool_use(rng: random.Random) -> Chat:
    """One to four declared tools; one or two questions that one of them answers."""
    tools = rng.sample(TOOLS, rng.randint(1, 4))
    names = [rng.choice(tool.names) for tool in tools]
    declared = tuple(map(_declaration, tools, names))
    messages: list[Message] = []
    if rng.random() < 0.12:
        messages += [user("Hello!"), assistant("Hello! How can I help you?")]
    for turn in range(rng.choice((1, 1, 1, 2))):
        i = rng.randrange(len(tools))
        messages += _round(rng, tools[i], names[i], first_id=10 * turn + 1)
    if rng.random() < 0.1:
        messages += [user("Thank you!"), assistant("You're welcome!")]
    return Chat(tuple(messages), tools=declared)


def draw_tool_call(rng: random.Random) -> Chat:
    """As `draw_tool_use`, but the conversation ends with the call."""
    chat = draw_tool_use(rng)
    last = max(i for i, message in enumerate(chat.messages) if message.tool_calls)
    return Chat(chat.messages[: last + 1], tools=chat.tools)
