"""Prefill and decode of a checkpoint on the CPU, beside mlx-lm on the same weights and threads.

    python benchmarks/cpu.py [MODEL_DIR] [--threads N] [--rounds R] [--out FILE]

Both run in this process, interleaved, in fp32, each with its own cache. mlx-lm is the peer that
has a K3 implementation on CPUs; it gets one warm-up of every shape. Also printed: how close the
two models' logits are (a speed-up of a wrong model is worth nothing), and the floor of one
decoded token: the bytes of the weights that it reads over the bandwidth of a large product.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from report import keep, provenance, spread

from perilune.model.api import LanguageModel, load_model
from perilune.model.lone import LoneSequence

PROMPT_LEN = 512
DECODE_STEPS = 64


class Ours:
    def __init__(self, loaded: LanguageModel) -> None:
        self.model = loaded.model
        self.reset()

    @torch.inference_mode()
    def run(self, ids: list[int]) -> list[float]:
        feed = self.sequence.decode if len(ids) == 1 else self.sequence.prefill
        return feed(torch.tensor(ids))[0].tolist()

    def reset(self) -> None:
        self.sequence = LoneSequence(self.model)


class Mlx:
    def __init__(self, loaded: LanguageModel, raw_config: dict[str, Any]) -> None:
        import mlx.core as mx
        from mlx_lm.models import kimi_k3

        self.mx = mx
        self.model = kimi_k3.Model(kimi_k3.ModelArgs.from_dict(raw_config))
        weights = {f"language_model.{k}": mx.array(v) for k, v in unstacked(loaded).items()}
        self.model.load_weights(list(self.model.sanitize(weights).items()), strict=True)
        self.model.eval()
        self.reset()

    def run(self, ids: list[int]) -> list[float]:
        out = self.model(self.mx.array([ids]), cache=self.cache)[0, -1]
        self.mx.eval(out)
        return out.tolist()

    def reset(self) -> None:
        self.cache = self.model.make_cache()


def unstacked(loaded: LanguageModel) -> dict[str, Any]:
    """numpy arrays under the released names, one entry an expert."""
    arrays: dict[str, Any] = {}
    for name, value in loaded.model.state_dict().items():
        stem, _, last = name.rpartition(".")
        if not stem.endswith("experts") or last not in ("w13", "w2"):
            arrays[name] = value.numpy()
            continue
        for expert, matrix in enumerate(value):
            if last == "w2":
                arrays[f"{stem}.{expert}.w2.weight"] = matrix.numpy()
            else:
                gate, up = matrix.chunk(2)
                arrays[f"{stem}.{expert}.w1.weight"] = gate.numpy()
                arrays[f"{stem}.{expert}.w3.weight"] = up.numpy()
    return arrays


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def measure(engine: Ours | Mlx, ids: list[int]) -> dict[str, float]:
    """Tokens per second of one prefill and of decoding after it."""
    engine.reset()
    prefill = seconds(lambda: engine.run(ids))
    decode = seconds(lambda: [engine.run([i]) for i in ids[:DECODE_STEPS]])
    return {"prefill": len(ids) / prefill, "decode": DECODE_STEPS / decode}


def decode_floor(loaded: LanguageModel, threads: int) -> dict[str, float]:
    """Bytes of fp32 weights that one token reads, and their time at measured bandwidth."""
    moe = loaded.config.moe
    read = sum(p.numel() for n, p in loaded.model.named_parameters() if "embed_tokens" not in n)
    routed = sum(p.numel() for n, p in loaded.model.named_parameters() if ".experts.w" in n)
    if moe is not None:
        read -= routed * (1 - moe.num_experts_per_token / moe.num_experts)
    block = torch.randn(64 << 20)
    best = min(seconds(lambda: block.sum()) for _ in range(5))
    bandwidth = block.nbytes / best
    return {
        "weights_per_token_mb_fp32": read * 4 / 1e6,
        "weights_per_token_mb_bf16": read * 2 / 1e6,
        "bandwidth_gb_s": bandwidth / 1e9,
        "floor_tokens_s_bf16": bandwidth / (read * 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="models/nano")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    # mlx's BLAS takes its threads from the environment, which must be set before it is imported.
    os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = str(args.threads)

    loaded = load_model(args.model)
    raw_config = json.loads((Path(args.model) / "config.json").read_text())
    engines = {"perilune": Ours(loaded), "mlx-lm": Mlx(loaded, raw_config)}
    generator = torch.Generator().manual_seed(0)
    vocab = loaded.config.vocab_size
    ids = torch.randint(0, vocab, (PROMPT_LEN,), generator=generator).tolist()

    logits = {name: torch.tensor(engine.run(ids)) for name, engine in engines.items()}
    gap = (logits["perilune"] - logits["mlx-lm"]).abs().max() / logits["mlx-lm"].abs().max()
    if not gap < 1e-3:
        raise SystemExit(f"the models disagree (relative difference {gap:.1e}); no speeds printed")
    for engine in engines.values():
        measure(engine, ids)

    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in engines}
    for _ in range(args.rounds):
        for name, engine in engines.items():
            rounds[name].append(measure(engine, ids))

    result: dict[str, Any] = {
        **provenance("torch", "numba", "mlx", "mlx-lm"),
        "prompt_len": PROMPT_LEN,
        "decode_steps": DECODE_STEPS,
        "logits_relative_difference": float(gap),
        "floor": decode_floor(loaded, args.threads),
        "tokens_per_s": {},
        "ratio": {},
    }
    for phase in ("prefill", "decode"):
        for name in engines:
            speeds = [r[phase] for r in rounds[name]]
            result["tokens_per_s"][f"{name} {phase}"] = spread(speeds)
        ratios = [
            ours[phase] / theirs[phase]
            for ours, theirs in zip(rounds["perilune"], rounds["mlx-lm"], strict=True)
        ]
        result["ratio"][phase] = spread(ratios)
    keep(result, args.out)


if __name__ == "__main__":
    main()
