"""`perilune generate PROMPT`: one answer on standard output."""

from __future__ import annotations

import argparse
import asyncio
import sys

from perilune.cli.local_model import OpenModel, add_model_option, open_model, positive_int
from perilune.cli.sampling_options import add_sampling_options, sampling_of
from perilune.cli.show import show
from perilune.core.types import ChatRequest, CompletionRequest, Message, TextPart


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", metavar="PROMPT", help="what to say; - reads standard input")
    parser.add_argument(
        "--raw", action="store_true", help="continue the text itself, without the chat format"
    )
    parser.add_argument(
        "--max-tokens", type=positive_int, default=256, metavar="N", help="limit (%(default)s)"
    )
    add_sampling_options(parser)
    add_model_option(parser)


def run(args: argparse.Namespace) -> int:
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    opened = open_model(args)
    asyncio.run(_generate(opened, prompt, args))
    return 0


async def _generate(opened: OpenModel, prompt: str, args: argparse.Namespace) -> None:
    model, engine = opened
    try:
        if args.raw:
            events = model.complete(
                CompletionRequest(
                    request_id="generate",
                    model=model.model_id,
                    prompt=prompt,
                    max_tokens=args.max_tokens,
                    sampling=sampling_of(args),
                )
            )
        else:
            events = model.chat(
                ChatRequest(
                    request_id="generate",
                    model=model.model_id,
                    messages=(Message(role="user", content=(TextPart(text=prompt),)),),
                    max_tokens=args.max_tokens,
                    sampling=sampling_of(args),
                )
            )
        answer = await show(events, sys.stdout)
        if answer.reasoning and not answer.content:
            print("(no answer: the reasoning took all of --max-tokens)", file=sys.stderr)
    finally:
        await engine.close()
