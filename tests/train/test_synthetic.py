"""Synthetic chats: the same from the same seed, well formed, and right."""

import json
import random
import re
from collections import Counter
from itertools import pairwise

import pytest

from perilune.train.document import message_text, plain_text
from perilune.train.synthetic import arithmetic, generate, recall, tools, words
from perilune.train.synthetic.python_tasks import draw_completion, python_tasks


@pytest.fixture(scope="module")
def documents():
    return list(generate.generate(400_000, seed=1))


def ask(draw, seed):
    chat = draw(random.Random(seed))
    return message_text(chat.messages[-2]), message_text(chat.messages[-1]), chat


def test_the_seed_decides_everything(documents):
    again = list(generate.generate(400_000, seed=1))
    other = list(generate.generate(400_000, seed=2))
    assert documents == again
    assert documents[:50] != other[:50]


def test_amount_of_text(documents):
    total = sum(len(plain_text(document).encode()) for document in documents)
    assert 400_000 <= total < 420_000


def test_every_chat_alternates_and_ends_with_the_assistant(documents):
    for document in documents:
        if document.conversation is None:
            continue
        roles = [m.role for m in document.conversation.messages if m.role != "system"]
        assert roles[0] == "user"
        assert roles[-1] == "assistant"
        for one, two in pairwise(roles):
            assert (
                two
                in {
                    "user": ("assistant",),
                    "assistant": ("user", "tool"),
                    "tool": ("tool", "assistant"),
                }[one]
            )


def test_reasoning_stands_only_in_thinking_mode(documents):
    modes = Counter()
    for document in documents:
        if document.conversation is not None:
            has_reasoning = any(m.reasoning for m in document.conversation.messages)
            modes[document.conversation.thinking, has_reasoning] += 1
    assert modes[False, True] == 0
    assert min(modes[True, True], modes[True, False], modes[False, False]) > 50


def test_sums_are_right():
    for seed in range(300):
        question, answer, chat = ask(arithmetic.draw_sum, seed)
        a, b = map(int, re.findall(r"\d+", question)[:2])
        sign = next(
            s
            for s, w in (
                ("+", "plus"),
                ("*", "times"),
                ("/", "divided"),
                ("-", "minus"),
                ("-", "-"),
            )
            if s in question or w in question
        )
        value = {"+": a + b, "-": a - b, "*": a * b, "/": a / b if b else 0}[sign]
        assert int(re.findall(r"\d+", answer)[-1]) == value
        thought = chat.messages[-1].reasoning
        if thought:
            assert int(re.findall(r"\d+", thought)[-1]) == value


@pytest.mark.parametrize(
    ("draw", "pattern", "answer"),
    [
        (words.draw_spelling, r"(?:word |spell |')(\w+)", lambda w: "-".join(w)),
        (words.draw_copy, r": (.*)$", lambda w: w),
    ],
)
def test_words_are_spelled_and_copied(draw, pattern, answer):
    for seed in range(60):
        question, said, _ = ask(draw, seed)
        found = re.search(pattern, question)
        assert said == answer(found[1])


def test_recalled_values_stand_in_the_context():
    for seed in range(100):
        question, answer, _ = ask(recall.draw_keys, seed)
        value = answer.split(" is ")[-1].rstrip(".")
        assert value in question


def test_tool_calls_fit_their_declaration():
    for seed in range(200):
        chat = tools.draw_tool_use(random.Random(seed))
        declared = {t["function"]["name"]: t["function"]["parameters"] for t in chat.tools}
        ids = [call.id for message in chat.messages for call in message.tool_calls]
        results = [m.tool_call_id for m in chat.messages if m.role == "tool"]
        assert ids == results
        assert len(ids) == len(set(ids)) > 0
        for message in chat.messages:
            for call in message.tool_calls:
                arguments = json.loads(call.arguments)
                assert set(arguments) == set(declared[call.name]["required"])


@pytest.mark.parametrize("task", python_tasks(), ids=lambda task: task.task)
def test_python_answers_run(task):
    names = {}
    exec(compile(task.code, task.task, "exec"), names)
    assert eval(task.check, names)


def test_modules_of_functions_parse():
    for seed in range(20):
        compile(draw_completion(random.Random(seed)), "module", "exec")
