"""A checkpoint directory as a running model: the engine and the text room wired together."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NamedTuple

import perilune
from perilune.core.errors import ConfigError
from perilune.core.protocols import Engine
from perilune.gateway.backends.local import LocalModel

MAX_RUNNING = 32


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


def positive_int(text: str) -> int:
    """For argparse, which words the error with the function's name."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def open_model(args: argparse.Namespace, *, max_running: int = MAX_RUNNING) -> OpenModel:
    """Loads the checkpoint in `--model`, by default the bundled one, and starts its engine.

    Raises:
        ConfigError: there is no such directory.
        CheckpointError: it holds no checkpoint that can be served.
        UnsupportedError: so, or this machine does not have the device.
    """
    directory = bundled_dir() if args.model_dir is None else Path(args.model_dir)
    if not directory.is_dir():
        raise ConfigError(f"{directory} is not a directory")
    from perilune.engine.client import open_engine  # torch: not for --help
    from perilune.kernels.common import jit_cache
    from perilune.model.device import device_of
    from perilune.text.load import load_chat_format

    chat_format = load_chat_format(directory)
    device = device_of(args.device)
    if device.type == "cpu" and jit_cache.is_empty():
        print("perilune: compiling loops for this CPU, once (about 20 s)", file=sys.stderr)
    engine = open_engine(
        directory,
        max_running=max_running,
        threads=args.threads,
        device=str(device),
        dtype=args.dtype,
        progress=sys.stderr.isatty(),
    )
    return OpenModel(LocalModel(engine, chat_format), engine)


def bundled_dir() -> Path:
    """`models/nano`, of the checkout or of the installed package."""
    package = Path(perilune.__file__).parent
    for directory in (package.parents[1] / "models" / "nano", package / "models" / "nano"):
        if (directory / "config.json").is_file():
            return directory
    raise ConfigError("the bundled models/nano is not here; name a checkpoint directory")
