"""Writes the card of the bundled model: `python -m perilune.train.card DATA_DIR MODEL_DIR`.

MODEL_DIR holds the checkpoint and the record of its run, `run.json` and `metrics.jsonl`; DATA_DIR
the manifest and the held-out text. README.md and curve.png are written into MODEL_DIR.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from perilune.model.parse_config import load_config
from perilune.model.sizes import cache_sizes, count_parameters, layer_pattern
from perilune.train import card_text
from perilune.train.baseline import Baseline, measure_all
from perilune.train.config import differences
from perilune.train.curve import draw_curve
from perilune.train.recipes import recipe
from perilune.train.run_facts import RunFacts, read_facts
from perilune.train.run_log import read_metrics
from perilune.train.samples import Sample, draw_samples


def write_card(data_dir: Path, model_dir: Path) -> Path:
    """Measures, samples, draws and writes; returns the card's path."""
    metrics = read_metrics(model_dir / "metrics.jsonl")
    draw_curve(metrics, model_dir / "curve.png")
    manifest = json.loads((data_dir / "manifest.json").read_text(encoding="utf-8"))
    sections = [
        card_text.HEAD,
        size_section(model_dir),
        card_text.USE,
        run_section(read_facts(model_dir), metrics),
        score_section(metrics, measure_all(data_dir)),
        source_section(manifest),
        sample_section(draw_samples(model_dir)),
    ]
    path = model_dir / "README.md"
    path.write_text("\n".join(section.strip() + "\n" for section in sections), encoding="utf-8")
    return path


def size_section(model_dir: Path) -> str:
    config = load_config(model_dir)
    parameters, cache = count_parameters(config), cache_sizes(config, 4096)
    weights = sum(path.stat().st_size for path in model_dir.glob("*.safetensors"))
    moe = config.moe
    assert moe is not None
    rows = [
        ("parameters", f"{parameters.total / 1e6:.1f} M"),
        ("active for a token", f"{parameters.activated / 1e6:.1f} M"),
        ("weights on disk", f"{weights / 1e6:.1f} MB (experts MXFP4, the rest bf16)"),
        ("layers", f"{config.num_layers}: {layer_pattern(config)}"),
        ("width", str(config.hidden_size)),
        ("experts", f"{moe.num_experts} of which {moe.num_experts_per_token} answer, 1 shared"),
        ("vocabulary", f"{config.vocab_size:,} (byte-level BPE, K3's control tokens)"),
        ("trained on rows of", "1,024 tokens; longer contexts are untested"),
        ("cache of 4,096 tokens", f"{cache.total / 2**20:.1f} MiB"),
    ]
    return "## Sizes\n\n" + table(("", ""), rows)


def run_section(run: RunFacts, metrics: list[dict[str, Any]]) -> str:
    trained_by = run.recipe
    last = [line["loss"] for line in metrics if "loss" in line][-10:]
    rows = [
        (kind, f"{share:.0%}", f"{run.epochs[kind]:.1f}")
        for kind, share in trained_by["mixture"].items()
    ]
    changed = differences(trained_by, recipe(trained_by["name"]).as_json())
    return card_text.RUN.format(
        name=trained_by["name"],
        steps=run.steps,
        rows=trained_by["rows"],
        row_len=trained_by["row_len"],
        tokens=f"{run.tokens / 1e6:.0f} M",
        minutes=f"{run.seconds / 60:.0f}",
        device=run.device,
        torch=run.torch,
        qat=f"{1 - trained_by['qat_from']:.0%}",
        optim=table(("optimiser", ""), [(k, str(v)) for k, v in trained_by["optim"].items()]),
        earlier=card_text.EARLIER.format(changed="; ".join(changed)) if changed else "",
        loss=f"{sum(last) / len(last):.2f}",
        mixture=table(("kind", "share of tokens", "epochs"), rows),
    )


def score_section(metrics: list[dict[str, Any]], baselines: list[Baseline]) -> str:
    scores = {key: value for line in metrics for key, value in line.items() if "bpb/" in key}
    rows = [
        (
            row.kind,
            f"{row.text_bytes:,}",
            f"**{scores['bpb/' + row.kind]:.3f}**",
            f"{row.xz_bits_per_byte:.3f}",
            f"{row.zstd_bits_per_byte:.3f}",
        )
        for row in baselines
    ]
    head = ("held-out text", "bytes", "nano", "xz -9e", "zstd -19")
    return card_text.SCORES.format(table=table(head, rows))


def source_section(manifest: Mapping[str, Any]) -> str:
    rows = [
        (
            source["name"],
            card_text.ORIGIN.get(source["origin"], source["origin"]),
            unquote(source["version"]).removesuffix(".deb"),
            source["licence"],
            ", ".join(source["kinds"]),
            f"{source['num_documents']:,}",
            f"{source['text_bytes'] / 1e6:.2f}",
        )
        for source in manifest["sources"]
    ]
    head = ("source", "from", "version", "licence", "kind", "documents", "MB of text")
    return card_text.SOURCES.format(table=table(head, rows))


def sample_section(samples: Iterable[Sample]) -> str:
    return card_text.SAMPLES + "\n".join(map(_sample, samples))


def _sample(sample: Sample) -> str:
    answer = sample.answer
    lines = [f"[thinks] {answer.reasoning.strip()}"] if answer.reasoning.strip() else []
    lines += [answer.text.strip()] if answer.text.strip() else []
    lines += [f"[calls] {call.name} {call.arguments}" for call in answer.tool_calls]
    lines += ["[cut here]"] if sample.is_cut else []
    body = "\n".join(lines) or "[nothing]"
    return f"**{sample.seed + 1}. {sample.prompt}**\n\n~~~~text\n{body}\n~~~~\n"


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A Markdown table."""
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data_dir", type=Path)
    parser.add_argument("model_dir", type=Path)
    args = parser.parse_args()
    print(write_card(args.data_dir, args.model_dir))


if __name__ == "__main__":
    main()
