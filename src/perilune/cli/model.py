"""`perilune model info|verify|convert`: sizes, integrity and storage of a checkpoint."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from perilune.core.errors import ConfigError
from perilune.model.config import ModelConfig
from perilune.model.parse_config import load_config
from perilune.model.presets import PRESETS, preset
from perilune.model.sizes import (
    GQA_HEAD_DIM,
    GQA_HEADS,
    cache_sizes,
    count_parameters,
    count_stored,
    layer_pattern,
)
from perilune.model.verify import CheckpointReport, verify_checkpoint

KIB, MIB, GIB = 2**10, 2**20, 2**30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    info = actions.add_parser("info", help="parameters, layers and cache sizes, by arithmetic")
    info.add_argument("model", help=f"a directory with config.json, or {', '.join(PRESETS)}")
    info.add_argument("--context", type=_positive, metavar="N", help="tokens (default: the most)")
    info.add_argument("--json", action="store_true", help="print one JSON object")
    verify = actions.add_parser("verify", help="check headers, names, shapes and dtypes")
    verify.add_argument("directory", type=Path)
    verify.add_argument("--json", action="store_true", help="print one JSON object")
    convert = actions.add_parser("convert", help="re-save with other storage types")
    convert.add_argument("source", type=Path)
    convert.add_argument("target", type=Path, help="a new directory")
    convert.add_argument("--experts", choices=("keep", "plain", "mxfp4"), default="keep")
    convert.add_argument("--dtype", choices=("bfloat16", "float16", "float32"))


def run(args: argparse.Namespace) -> int:
    """Runs the chosen action; wrong files raise the errors of `perilune.core.errors`."""
    return {"info": _info, "verify": _verify, "convert": _convert}[args.action](args)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not {text!r}")
    return int(text)


def _info(args: argparse.Namespace) -> int:
    config = _find_config(args.model)
    facts = model_info(config, args.context or config.max_position_embeddings)
    if args.json:
        print(json.dumps({"model": args.model, **facts}, indent=2))
    else:
        print(f"{args.model} ({config.family})")
        print(_describe(facts))
    return 0


def _find_config(name: str) -> ModelConfig:
    if name in PRESETS:
        return preset(name)
    if not Path(name).is_dir():
        raise ConfigError(f"{name!r} is neither a directory nor one of {', '.join(PRESETS)}")
    return load_config(name)


def model_info(config: ModelConfig, context: int) -> dict[str, Any]:
    """What `model info --json` prints, without the name. Cache sizes are bytes of one sequence."""
    layers, cache = range(config.num_layers), cache_sizes(config, context)
    return {
        "family": config.family,
        "parameters": asdict(count_parameters(config)),
        "stored": asdict(count_stored(config)),
        "layers": {
            "count": config.num_layers,
            "pattern": layer_pattern(config),
            "map": [
                f"{'MLA' if config.is_mla(i) else 'KDA'}+{'MoE' if config.is_moe(i) else 'dense'}"
                for i in layers
            ],
        },
        "cache": {
            **asdict(cache),
            "total": cache.total,
            "saving_over_all_mla": round(cache.saving_over_all_mla, 4),
            "saving_over_gqa": round(cache.saving_over_gqa, 4),
        },
        "ignored_keys": sorted(set(config.ignored_keys)),
    }


def _describe(facts: dict[str, Any]) -> str:
    p, stored, layers, cache = (facts[k] for k in ("parameters", "stored", "layers", "cache"))
    num_moe = sum(kind.endswith("MoE") for kind in layers["map"])
    crossover = cache["crossover"]
    vision = f" ({_count(p['with_vision'])} with vision)" if p["with_vision"] > p["total"] else ""
    lines = [
        ("parameters", _count(p["total"]) + vision),
        ("activated", f"{_count(p['activated'])} a token (with lm_head, without input embedding)"),
        ("stored", f"{stored['tensors']:,} tensors, {stored['bytes']:,} bytes"),
        ("layers", f"{layers['count']}: {layers['pattern']}; {num_moe} MoE"),
        ("cache", f"of one sequence of {cache['context']:,} tokens:"),
        ("  KDA state, fp32", _bytes(cache["kda_state"])),
        ("  conv taps, bf16", _bytes(cache["conv_taps"])),
        (
            "  MLA latents, bf16",
            f"{_bytes(cache['latent'])} ({cache['latent_per_token']:,} B a token)",
        ),
        ("  together", _bytes(cache["total"])),
        ("  if all MLA", f"{_bytes(cache['all_mla'])}: {_saving(cache['saving_over_all_mla'])}"),
        (
            f"  if GQA {GQA_HEADS} x {GQA_HEAD_DIM}",
            f"{_bytes(cache['gqa'])}: {_saving(cache['saving_over_gqa'])}",
        ),
        (
            "  smaller than all MLA",
            "never (no KDA layer)" if crossover is None else f"from {crossover:,} tokens on",
        ),
    ]
    if facts["ignored_keys"]:
        lines.append(("ignored keys", ", ".join(facts["ignored_keys"])))
    return "\n".join(f"{label:<24}{value}" for label, value in lines)


def _saving(share: float) -> str:
    return f"the hybrid is {abs(share):.1%} {'smaller' if share >= 0 else 'larger'}"


def _count(value: int) -> str:
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6)):
        if value >= size:
            return f"{value / size:.{4 if unit == 'T' else 2}f} {unit}"
    return f"{value:,}"


def _bytes(value: int) -> str:
    for unit, size in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if value >= size:
            return f"{value / size:,.2f} {unit}"
    return f"{value} B"


def _verify(args: argparse.Namespace) -> int:
    report = verify_checkpoint(args.directory, progress=sys.stderr.isatty())
    print(json.dumps(_counts(report), indent=2) if args.json else _summary(args.directory, report))
    return 0


def _counts(report: CheckpointReport) -> dict[str, Any]:
    return {
        "files": len(report.files),
        "tensors": report.num_tensors,
        "bytes": report.num_bytes,
        "skipped_tensors": len(report.skipped),
        "skipped_bytes": report.skipped_bytes,
        "notes": list(report.notes),
    }


def _summary(directory: Path, report: CheckpointReport) -> str:
    lines = [
        f"{directory}: good: {report.num_tensors:,} tensors, {report.num_bytes:,} bytes in "
        f"{len(report.files)} file(s), as config.json says"
    ]
    if report.skipped:
        size = _bytes(report.skipped_bytes)
        lines.append(f"skipped: {len(report.skipped)} vision tensors, {size}: this is a text model")
    return "\n".join([*lines, *(f"note: {note}" for note in report.notes)])


def _convert(args: argparse.Namespace) -> int:
    from perilune.model.convert import convert_checkpoint  # needs torch; the other actions do not

    report = convert_checkpoint(
        args.source,
        args.target,
        experts=args.experts,
        dtype=args.dtype,
        progress=sys.stderr.isatty(),
    )
    print(_summary(args.target, report))
    return 0
