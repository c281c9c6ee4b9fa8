"""Small Python functions that are right: each has checks that the tests run."""

from __future__ import annotations

import random
import re
from functools import cache
from importlib import resources
from typing import NamedTuple

from perilune.train.synthetic.chat import Chat, exchange

_ASKS = (
    "Write a Python function that {t}.",
    "Write a Python function that {t} and explain it.",
    "Show me Python code that {t}, with comments.",
    "Can you write a function in Python that {t}?",
    "Python function that {t}",
    "I need a Python function that {t}.",
)


class PythonTask(NamedTuple):
    task: str
    """Completes 'a function that …'."""
    explanation: str
    check: str
    """An expression that is true once the code has run."""
    code: str


@cache
def python_tasks() -> tuple[PythonTask, ...]:
    """The tasks of `python_tasks.txt`: blocks of `# task`, `# why`, `# check` and code."""
    text = (
        resources.files("perilune.train.synthetic").joinpath("python_tasks.txt").read_text("utf-8")
    )
    return tuple(map(_parse, re.split(r"\n(?=# task: )", text.strip())))


def _parse(block: str) -> PythonTask:
    lines = block.split("\n")
    fields = [line.split(": ", 1)[1] for line in lines[:3]]
    return PythonTask(*fields, code="\n".join(lines[3:]).strip())


def draw_python(rng: random.Random) -> Chat:
    task = rng.choice(python_tasks())
    question = rng.choice(_ASKS).format(t=task.task)
    answer = f"```python\n{task.code}\n```"
    if "explain" in question or rng.random() < 0.5:
        answer += f"\n\n{task.explanation}"
    if rng.random() < 0.3:
        answer = rng.choice(
            ("Here is the function:", "Sure! Here it is:", "Here is one way to do it:")
        ) + ("\n\n" + answer)
    return exchange(question, answer)


def draw_completion(rng: random.Random) -> str:
    """A module of a few of the functions as plain code, in random order."""
    tasks = rng.sample(python_tasks(), rng.randint(2, 6))
    return "\n\n\n".join(_with_docstring(task) for task in tasks) + "\n"


def _with_docstring(task: PythonTask) -> str:
    head, _, body = task.code.partition("):\n")
    if not task.code.startswith("def ") or not body:
        return task.code
    summary = task.task[0].upper() + task.task[1:]
    return f'{head}):\n    """{summary}."""\n{body}'
