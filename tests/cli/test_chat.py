"""`perilune chat`."""

from __future__ import annotations

import io

import pytest

from perilune.cli.main import main
from perilune.text.tiktoken_ranks import byte_level


@pytest.fixture
def say(monkeypatch, capsys, engine):
    """Runs a chat with these lines typed; returns (stdout, stderr)."""

    def say(*lines: str, argv: tuple[str, ...] = ()) -> tuple[str, str]:
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        assert main(["chat", *argv]) == 0
        return capsys.readouterr()

    return say


def prompts(engine) -> list[str]:
    return [byte_level().decode(request.prompt_ids) for request in engine.requests]


def test_a_turn_is_answered_and_the_end_of_input_ends_the_chat(say, engine, answer_ids):
    engine.script = lambda request: answer_ids("Hello!")
    assert say("hi") == ("Hello!\n", "")


def test_the_history_is_kept_with_its_reasoning(say, engine, answer_ids):
    answers = iter(["one", "two"])
    engine.script = lambda request: answer_ids(next(answers), reasoning="because")
    say("first", "second")
    second = prompts(engine)[1]
    assert second.index("first") < second.index("because") < second.index("one")
    assert second.index("one") < second.index("second")
    assert "<|open|>think<|sep|>because<|close|>think<|sep|>" in second


def test_reset_forgets_all_but_the_system_message(say, engine, answer_ids):
    engine.script = lambda request: answer_ids("ok")
    say("first", "/reset", "second", argv=("--system", "Be brief."))
    assert "first" not in prompts(engine)[1]
    assert all("Be brief." in prompt for prompt in prompts(engine))


def test_quit_ends_the_chat(say, engine, answer_ids):
    engine.script = lambda request: answer_ids("ok")
    say("/quit", "never")
    assert engine.requests == []


def test_empty_lines_and_unknown_commands_are_no_turns(say, engine):
    _, err = say("", "  ", "/what")
    assert "/reset" in err
    assert engine.requests == []


def test_a_turn_that_fails_is_told_and_forgotten(say, engine, answer_ids):
    engine.script = lambda request: answer_ids("ok")
    out, err = say("x" * 5000, "short")
    assert out == "ok\n"
    assert "4096" in err
    assert "xxx" not in prompts(engine)[-1]


def test_ctrl_c_stops_the_answer_and_not_the_chat(say, engine, answer_ids, monkeypatch):
    def interrupted(request):
        yield from answer_ids("start")[:3]
        raise KeyboardInterrupt

    scripts = iter([interrupted, lambda request: answer_ids("ok")])
    engine.script = lambda request: next(scripts)(request)
    out, err = say("stop me", "go on")
    assert "stopped" in err
    assert out.endswith("ok\n")
    assert "stop me" not in prompts(engine)[-1]
    assert engine.num_open == 0
