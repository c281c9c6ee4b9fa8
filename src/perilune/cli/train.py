"""`perilune train RECIPE`: makes a recipe's data (`--prepare`), or trains its model."""

from __future__ import annotations

import argparse
import shlex
from dataclasses import replace
from pathlib import Path

from perilune.cli.local_model import positive_int
from perilune.core.env import launched
from perilune.core.errors import ConfigError
from perilune.train.config import TrainConfig
from perilune.train.override import override
from perilune.train.recipes import RECIPES, recipe


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", help=" or ".join(RECIPES))
    parser.add_argument("--resume", action="store_true", help="go on from the last save")
    parser.add_argument(
        "--stop-after-minutes",
        type=float,
        metavar="M",
        help="save and stop at the first step that ends later; go on with --resume",
    )
    parser.add_argument(
        "--profile",
        type=positive_int,
        metavar="N",
        help="profile N steps, the third one first, into the folder `profile` of the run",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="(default: the recipe's)")
    parser.add_argument("--steps", type=positive_int, metavar="N", help="length of the run")
    parser.add_argument("--out", metavar="DIR", help="folder of the run")
    parser.add_argument("--data", metavar="DIR", help="folder of the token shards")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="settings",
        metavar="A.B=C",
        help="replace one value of the recipe, for example optim.peak_lr=1e-3; may be repeated",
    )
    prepare = parser.add_argument_group("preparing data (instead of training)")
    prepare.add_argument(
        "--prepare", action="store_true", help="fetch the sources, encode them, write the shards"
    )
    prepare.add_argument(
        "--chat", type=Path, metavar="DIR", help="folder of the smol_chat_*.jsonl.xz files"
    )


def run(args: argparse.Namespace) -> int:
    """Prepares or trains; wrong settings and missing data raise `ConfigError`."""
    config = recipe(args.recipe)
    for setting in args.settings:
        config = override(config, setting)
    if args.device is not None:
        config = config.on(args.device)
    given = {"steps": args.steps, "out_dir": args.out, "data_dir": args.data}
    config = replace(config, **{key: value for key, value in given.items() if value is not None})
    return _prepare(args, config) if args.prepare else _train(args, config)


def _prepare(args: argparse.Namespace, config: TrainConfig) -> int:
    from perilune.train.prepare import prepare, prepare_synthetic

    data, tokenizer_dir = Path(config.data_dir), Path(config.tokenizer_dir)
    if _needs_no_sources(config):
        prepared = prepare_synthetic(data, tokenizer_dir=tokenizer_dir)
    elif args.chat is None:
        raise ConfigError(
            "--prepare needs --chat DIR, the folder of the smol_chat_*.jsonl.xz files"
        )
    else:
        cache = data.parent / "cache"
        prepared = prepare(data, cache, chat_dir=args.chat, tokenizer_dir=tokenizer_dir)
    shards = prepared.manifest["shards"].values()
    print(f"{data}: {sum(shard['num_tokens'] for shard in shards):,} tokens")
    return 0


def _needs_no_sources(config: TrainConfig) -> bool:
    return config.mixture.keys() == {"synthetic"}


def _train(args: argparse.Namespace, config: TrainConfig) -> int:
    # Here for --help's sake; all at once, so that a missing extra is told before hours of work.
    import torch

    from perilune.train.curve import CURVE_FILE
    from perilune.train.loop import train
    from perilune.train.stop_signals import StopSignals

    rank, size, _ = launched()
    if not (Path(config.data_dir) / "manifest.json").is_file():
        if size > 1 or not _needs_no_sources(config):
            chat = "" if _needs_no_sources(config) else " --chat DIR"
            raise ConfigError(
                f"{config.data_dir} holds no training data; make it with: "
                f"perilune train {args.recipe} --prepare{chat} --data {config.data_dir}"
            )
        _prepare(args, config)
    if config.threads:
        torch.set_num_threads(config.threads)
    minutes = args.stop_after_minutes
    stop_after_s = None if minutes is None else 60 * minutes
    with StopSignals() as signals:
        directory = train(
            config,
            resume=args.resume,
            stop_after_s=stop_after_s,
            is_stopped=signals.is_stopped,
            profile_steps=args.profile or 0,
        )
    stopped = 0 if signals.received is None else 128 + signals.received
    if rank:
        return stopped
    out = Path(config.out_dir)
    if directory is not None:
        print(f"{directory}: the trained model; curves in {out / CURVE_FILE}")
        return 0
    print(f"{out}: saved before the last step; go on with: {_resume_command(args)}")
    return stopped


def _resume_command(args: argparse.Namespace) -> str:
    """The command line that goes on with the run of `args`, to its end."""
    options = [("--device", args.device), ("--steps", args.steps)]
    options += [("--out", args.out), ("--data", args.data)]
    options += [("--set", setting) for setting in args.settings]
    words = [word for option in options if option[1] is not None for word in map(str, option)]
    return shlex.join(["perilune", "train", args.recipe, *words, "--resume"])
