"""`perilune generate`."""

from __future__ import annotations

import io

import pytest

from perilune.cli.main import main
from perilune.text.tiktoken_ranks import byte_level


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_answer_is_on_standard_output_without_its_reasoning(capsys, engine, answer_ids):
    engine.script = lambda request: answer_ids("Grüße", reasoning="hidden")
    assert main(["generate", "Hello"]) == 0
    assert capsys.readouterr() == ("Grüße\n", "")
    prompt = byte_level().decode(engine.requests[0].prompt_ids)
    assert 'role="user"<|sep|>Hello<|close|>' in prompt


def test_on_a_terminal_reasoning_is_dimmed(monkeypatch, engine, answer_ids):
    engine.script = lambda request: answer_ids("hi", reasoning="r")
    monkeypatch.setattr("sys.stdout", terminal := Terminal())
    main(["generate", "Hello"])
    assert terminal.getvalue() == "\x1b[2mr\x1b[0m\nhi\n"


def test_raw_continues_the_text_itself(capsys, engine):
    engine.script = lambda request: b" upon"
    main(["generate", "--raw", "Once"])
    assert capsys.readouterr().out == " upon\n"
    assert engine.requests[0].prompt_ids == tuple(b"Once")


def test_a_dash_reads_standard_input(capsys, engine, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("piped\n"))
    main(["generate", "--raw", "-"])
    assert engine.requests[0].prompt_ids == tuple(b"piped\n")


def test_options_reach_the_engine(engine, answer_ids):
    engine.script = lambda request: answer_ids("x")
    argv = ["--temperature", "0", "--top-p", "0.5", "--seed", "3", "--max-tokens", "9"]
    main(["generate", "x", *argv])
    request = engine.requests[0]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.seed) == (0, 0.5, 3)
    assert request.max_tokens == 9


def test_an_answer_that_is_all_reasoning_is_explained(capsys, engine, answer_ids):
    engine.script = lambda request: answer_ids("never", reasoning="a long thought")
    assert main(["generate", "x", "--max-tokens", "5"]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert "--max-tokens" in err


def test_a_prompt_that_is_too_long_is_one_line(capsys, engine):
    assert main(["generate", "--raw", "x" * 5000]) == 1
    assert "4096" in capsys.readouterr().err


def test_the_engine_is_closed_whatever_happens(engine):
    engine.fail_after = 0
    assert main(["generate", "x"]) == 1
    assert main(["generate", "x"]) == 1
    assert engine.num_open == 0


@pytest.mark.parametrize("seed", ["1", "2"])
def test_a_real_checkpoint_gives_the_same_text_for_the_same_seed(capsys, checkpoint, seed):
    argv = ["generate", "--raw", "ab", "--model", str(checkpoint)]
    argv += ["--max-tokens", "12", "--seed", seed, "--threads", "1", "--device", "cpu"]
    texts = []
    for _ in range(2):
        assert main(argv) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert len(texts[0]) > 1


@pytest.mark.parametrize("command", [["generate", "x"], ["chat"]])
def test_a_gpu_that_is_not_here_is_one_line(monkeypatch, capsys, checkpoint, command):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main([*command, "--device", "cuda", "--model", str(checkpoint)]) == 1
    error = capsys.readouterr().err
    assert "device 'cuda' cannot be used" in error
    assert error.count("\n") == 1


def test_half_precision_is_an_option(capsys, checkpoint):
    argv = ["generate", "--raw", "ab", "--model", str(checkpoint), "--device", "cpu"]
    assert main([*argv, "--dtype", "bfloat16", "--max-tokens", "4", "--threads", "1"]) == 0


def test_a_terminal_is_not_left_dim(monkeypatch, engine, answer_ids):
    engine.script = lambda request: answer_ids("", reasoning="long")
    engine.fail_after = 2
    monkeypatch.setattr("sys.stdout", terminal := Terminal())
    assert main(["generate", "Hello"]) == 1
    assert terminal.getvalue() == "\x1b[2mlo\x1b[0m\n"
