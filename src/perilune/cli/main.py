"""`perilune`: finds the command's module, parses, runs, and turns errors into one line."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import perilune
from perilune import __version__
from perilune.core.errors import PeriluneError


class Command(NamedTuple):
    module: str
    """Has `add_arguments(parser)` and `run(args) -> int`; imported only when it is called for."""
    help: str


COMMANDS = {
    "serve": Command("perilune.cli.serve", "serve a checkpoint over an OpenAI-compatible HTTP API"),
    "generate": Command("perilune.cli.generate", "answer one prompt"),
    "chat": Command("perilune.cli.chat", "talk to a model in the terminal"),
    "model": Command("perilune.cli.model", "describe, verify or convert a checkpoint"),
    "kernels": Command("perilune.cli.kernels", "list the ops, check and time their backends"),
    "train": Command("perilune.cli.train", "train a model by a recipe"),
    "bench": Command("perilune.cli.bench", "measure a server under load, its cache, long contexts"),
}

EXTRAS = {
    "torch": "engine",
    "safetensors": "engine",
    "numpy": "engine",
    "tokenizers": "engine",
    "matplotlib": "train",
}
"""Modules that the base install leaves out, and the extra that brings them."""

FAILURE, USAGE, INTERRUPTED = 1, 2, 130


class OneLineParser(argparse.ArgumentParser):
    """Tells a usage error in one line that names the help of the innermost command."""

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"perilune: error: {message} (see {self.prog} --help)\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        # argparse hands what a subcommand does not know up to the outermost parser, whose help
        # does not tell it either.
        namespace, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return namespace, unknown


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0; 1 failed, 2 wrong usage, 130 after Ctrl-C, 143 after SIGTERM."""
    argv = sys.argv[1:] if argv is None else argv
    parser = _parser_for(argv[0] if argv else None)
    if not argv:
        parser.print_help(sys.stderr)
        return USAGE
    try:
        try:
            args = parser.parse_args(argv)
            return args.run(args)
        finally:
            sys.stdout.flush()
    except PeriluneError as error:
        return _fail(str(error))
    except ModuleNotFoundError as error:
        extra = EXTRAS.get(error.name or "")
        if extra is None:
            raise
        return _fail(f"{argv[0]} needs {error.name}: {_installation(extra)}")
    except BrokenPipeError:
        # The reader has enough. Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILURE
    except OSError as error:
        return _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except KeyboardInterrupt:
        return INTERRUPTED


def _installation(extra: str) -> str:
    """The command that installs `extra`: for this checkout, or else for the published package."""
    checkout = Path(perilune.__file__).parents[2]
    if all((checkout / name).is_file() for name in ("pyproject.toml", "constraints.txt")):
        return f".venv/bin/pip install -c constraints.txt -e '.[{extra}]'"
    return f"pip install 'perilune[{extra}]'"


def _parser_for(command: str | None) -> argparse.ArgumentParser:
    """All commands by name and help; the arguments of `command` alone, so that help stays quick."""
    parser = OneLineParser(prog="perilune", description=_DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"perilune {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, (module_name, text) in COMMANDS.items():
        subparser = commands.add_parser(
            name, help=text, description=text[0].upper() + text[1:] + "."
        )
        if name == command:
            module = importlib.import_module(module_name)
            module.add_arguments(subparser)
            subparser.set_defaults(run=module.run)
    return parser


_DESCRIPTION = "The open stack for models of the Kimi K3 kind."


def _fail(message: str) -> int:
    print(f"perilune: error: {message}", file=sys.stderr)
    return FAILURE


if __name__ == "__main__":
    sys.exit(main())
