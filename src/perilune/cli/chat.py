"""`perilune chat`: a conversation in the terminal."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from collections.abc import Iterator

from perilune.cli.local_model import OpenModel, add_model_option, open_model, positive_int
from perilune.cli.sampling_options import add_sampling_options, sampling_of
from perilune.cli.show import show
from perilune.core.errors import RequestError
from perilune.core.types import ChatRequest, Message, Role, SamplingParams, TextPart

HINT = "/reset forgets the conversation, /quit or Ctrl-D ends it, Ctrl-C stops an answer"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument(
        "--max-tokens", type=positive_int, metavar="N", help="of an answer (default: the context)"
    )
    add_sampling_options(parser)
    add_model_option(parser)


def run(args: argparse.Namespace) -> int:
    opened = open_model(args)
    with contextlib.suppress(ImportError):  # line editing, where Python has it
        import readline  # noqa: F401
    with asyncio.Runner() as runner:
        try:
            _Conversation(opened, args).run(runner)
        finally:
            runner.run(opened.engine.close())
    return 0


class _Conversation:
    """The messages so far. Reasoning is kept in them: the model was trained to see it again."""

    def __init__(self, opened: OpenModel, args: argparse.Namespace) -> None:
        self._model = opened.model
        self._max_tokens: int | None = args.max_tokens
        self._sampling: SamplingParams = sampling_of(args)
        self._opening = [_message("system", args.system)] if args.system else []
        self._history = list(self._opening)

    def run(self, runner: asyncio.Runner) -> None:
        if sys.stdin.isatty():
            print(HINT)
        for line in _lines():
            if line == "/quit":
                return
            if line == "/reset":
                self._history = list(self._opening)
            elif line.startswith("/"):
                print(HINT, file=sys.stderr)
            elif line:
                self._take_turn(runner, line)

    def _take_turn(self, runner: asyncio.Runner, line: str) -> None:
        """A turn that fails or is stopped leaves no trace in the history."""
        turn = [*self._history, _message("user", line)]
        request = ChatRequest(
            request_id=f"turn-{len(turn)}",
            model=self._model.model_id,
            messages=tuple(turn),
            max_tokens=self._max_tokens,
            sampling=self._sampling,
        )
        try:
            answer = runner.run(show(self._model.chat(request), sys.stdout))
        except KeyboardInterrupt:
            print("(stopped; this turn is forgotten)", file=sys.stderr)
        except RequestError as error:
            print(f"perilune: error: {error}; /reset starts afresh", file=sys.stderr)
        else:
            self._history = [*turn, answer]


def _message(role: Role, text: str) -> Message:
    return Message(role=role, content=(TextPart(text=text),))


def _lines() -> Iterator[str]:
    """Lines of standard input, until its end."""
    prompt = "> " if sys.stdin.isatty() else ""
    while True:
        try:
            yield input(prompt).strip()
        except EOFError:
            return
