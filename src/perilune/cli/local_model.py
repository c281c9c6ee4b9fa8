"""A checkpoint directory as a running model: the engine and the text room wired together.

A command that ends with its answer has the engine in a thread; a server has it in a process.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NamedTuple

import perilune
from perilune.core.errors import ConfigError
from perilune.core.protocols import Engine
from perilune.engine.client import EngineClient
from perilune.engine.supervisor import Supervisor
from perilune.gateway.backends.local import LocalModel
from perilune.text.chat import ChatFormat
from perilune.text.load import load_chat_format
from perilune.text.token_table import table_of

OPEN_CORE = "perilune.engine.opening:open_core"
"""What the engine's process makes its engine with; named, because it imports torch."""


class OpenModel(NamedTuple):
    model: LocalModel
    engine: Engine
    """To be closed by whoever opened it."""


def add_model_option(parser: argparse.ArgumentParser) -> None:
    """`--model` and how it runs, for commands that take something else as their argument."""
    parser.add_argument(
        "--model",
        dest="model_dir",
        metavar="DIR",
        help="checkpoint directory (default: the bundled nano)",
    )
    add_run_options(parser)


def add_run_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--threads",
        type=positive_int,
        metavar="N",
        help="torch threads of the engine (default: PERILUNE_THREADS, else torch's choice)",
    )
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="auto takes a GPU where one is ready (%(default)s)",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of weights and activations; bfloat16 halves the memory (%(default)s)",
    )
    parser.add_argument(
        "--draft-model",
        metavar="DIR",
        help="smaller checkpoint of the same vocabulary that guesses tokens, where the text itself "
        "has no guess; answers stay the same",
    )
    parser.add_argument(
        "--no-speculation", action="store_true", help="guess no tokens, not even from the text"
    )


def positive_int(text: str) -> int:
    """For argparse, which words the error with the function's name."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def open_model(args: argparse.Namespace) -> OpenModel:
    """Loads the checkpoint in `--model`, by default the bundled one, and starts its engine.

    Raises:
        ConfigError: there is no such directory.
        CheckpointError: it holds no checkpoint that can be served.
        UnsupportedError: so, or this machine does not have the device.
    """
    directory = _directory(args)
    chat_format = load_chat_format(directory)
    from perilune.engine.opening import open_engine  # torch: not for --help

    engine = open_engine(directory, **_options(args, chat_format))
    return OpenModel(LocalModel(engine, chat_format), engine)


async def start_model(args: argparse.Namespace, **options: Any) -> OpenModel:
    """As `open_model`, in a process that is started again when it dies. This one has no torch.
    `options`: more of what `OPEN_CORE` takes."""
    directory = _directory(args)
    chat_format = load_chat_format(directory)
    supervisor = Supervisor(
        OPEN_CORE,
        model_dir=str(directory),
        **options,
        **_options(args, chat_format),
    )
    await supervisor.start()
    engine = EngineClient(supervisor)
    return OpenModel(LocalModel(engine, chat_format), engine)


def _directory(args: argparse.Namespace) -> Path:
    directory = bundled_dir() if args.model_dir is None else Path(args.model_dir)
    if not directory.is_dir():
        raise ConfigError(f"{directory} is not a directory")
    return directory


def _options(args: argparse.Namespace, chat_format: ChatFormat) -> dict[str, Any]:
    return {
        "token_table": table_of(chat_format.tokenizer),
        "threads": args.threads,
        "device": args.device,
        "dtype": args.dtype,
        "draft_model": args.draft_model,
        "speculation": not args.no_speculation,
        "progress": True,
    }


def bundled_dir() -> Path:
    """`models/nano`, of the checkout or of the installed package."""
    package = Path(perilune.__file__).parent
    for directory in (package.parents[1] / "models" / "nano", package / "models" / "nano"):
        if (directory / "config.json").is_file():
            return directory
    raise ConfigError("the bundled models/nano is not here; name a checkpoint directory")
