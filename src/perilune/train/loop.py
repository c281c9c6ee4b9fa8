"""The training loop, top to bottom: load, step, log, evaluate, save.

A run folder holds `metrics.jsonl` (a line a logged step), `train_state.safetensors` (resume) and
`model/` (the released layout).
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from perilune.model.config import parse_config
from perilune.model.init import init_weights
from perilune.model.model import Transformer
from perilune.model.mxfp4 import fake_quantize
from perilune.train.checkpoint import load_state, save_state
from perilune.train.config import TrainConfig
from perilune.train.data import PackedLoader
from perilune.train.evaluate import evaluate, held_out_sets
from perilune.train.optim import build_optimizers
from perilune.train.shards import load_shard
from perilune.train.step import (
    Batch,
    Stepper,
    StepResult,
    attach_balancers,
    batch_loss,
    moe_layers,
)


class QuantiseFrom:
    """Straight-through MXFP4 of expert weights, off until `switch_on`.

    The switch is a tensor, so that a compiled step serves both halves of a run.
    """

    def __init__(self, device: str) -> None:
        self.on = torch.zeros((), device=device)

    def __call__(self, w: Tensor) -> Tensor:
        return w + self.on * (fake_quantize(w) - w).detach()

    def switch_on(self) -> None:
        self.on.fill_(1.0)


def train(config: TrainConfig, resume: bool = False) -> Path:
    """Runs `config` to its last step and returns the run folder.

    Raises:
        CheckpointError: `resume` without a state, or one of another model.
        NonFiniteError: the loss or a gradient stopped being finite.
    """
    out = Path(config.out_dir)
    out.mkdir(parents=True, exist_ok=True)
    torch.set_float32_matmul_precision("high")
    model = build_model(config)
    quantise = QuantiseFrom(config.device)
    for layer in moe_layers(model):
        layer.quantize = quantise
    optimizers = build_optimizers(model, config.optim)
    loader = open_loader(config)
    loss_fn = torch.compile(batch_loss, dynamic=False) if config.compile else batch_loss
    stepper = Stepper(model, optimizers, config.optim, config.steps, loss_fn)
    first = 0
    if resume:
        progress = load_state(out, model, optimizers)
        loader.load_state_dict(progress["loader"])
        first = progress["step"]
    log = RunLog(out, config, first)
    batches = ahead(loader)
    for step in range(first, config.steps):
        if step >= config.qat_from * config.steps:
            quantise.switch_on()
        arrays, cursor = next(batches)
        result = stepper(step, to_batch(arrays, config.device))
        done = step + 1
        log.step(done, result)
        if done % config.eval_every == 0 or done == config.steps:
            log.record(done, validation(model, config))
        if done % config.save_every == 0 or done == config.steps:
            save_state(out, model, optimizers, {"step": done, "loader": cursor})
    log.close()
    return out


def build_model(config: TrainConfig) -> Transformer:
    """The recipe's model with fresh weights (from the seed), balancers attached."""
    model = Transformer(parse_config(config.model, f"recipe {config.name}"))
    init_weights(model, torch.Generator().manual_seed(config.seed))
    model.to(config.device).train()
    model.model.compute_dtype = getattr(torch, config.compute_dtype)
    attach_balancers(model)
    return model


def open_loader(config: TrainConfig) -> PackedLoader:
    """The recipe's mixture, from its shards, at the start of its first epoch."""
    folder = Path(config.data_dir)
    shards = {kind: load_shard(folder, f"train_{kind}") for kind in config.mixture}
    pad_id = parse_config(config.model).pad_token_id or 0
    return PackedLoader(
        shards,
        config.mixture,
        batch_rows=config.rows,
        row_len=config.row_len,
        pad_id=pad_id,
        seed=config.seed,
    )


def ahead(loader: PackedLoader) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Batches, each with the cursor that follows it, packed in a thread while the step runs."""
    ready: queue.Queue[tuple[Any, dict[str, Any]]] = queue.Queue(maxsize=4)

    def pack() -> None:
        for batch in loader:
            ready.put((batch, loader.state_dict()))

    threading.Thread(target=pack, daemon=True).start()
    while True:
        yield ready.get()


def trained_model(config: TrainConfig) -> Transformer:
    """The model of a finished or interrupted run, on the CPU, without optimiser state."""
    model = Transformer(parse_config(config.model, f"recipe {config.name}"))
    load_state(Path(config.out_dir), model, [])
    return model


def to_batch(arrays: tuple[Any, Any, Any], device: str) -> Batch:
    """Arrays [B, L] of ids, targets and document numbers as tensors on `device`."""
    inputs, targets, segments = (torch.as_tensor(a) for a in arrays)
    parts = (inputs.long(), targets.long(), segments.long())
    return Batch(*(p.to(device, non_blocking=True) for p in parts))


def validation(model: Transformer, config: TrainConfig) -> dict[str, float]:
    """Bits per byte of each kind of held-out text. Not compiled: it runs too rarely to pay."""
    scores = {}
    pad_id = model.config.pad_token_id or 0
    for held_out in held_out_sets(Path(config.data_dir), config.row_len, config.rows, pad_id):
        batches = (to_batch(b, config.device) for b in held_out.batches)
        score = evaluate(model, batches, batch_loss)
        scores[f"bpb/{held_out.kind}"] = score.bits_per_byte(held_out.text_bytes)
    return scores


class RunLog:
    """`metrics.jsonl` and the progress line of a run."""

    def __init__(self, out: Path, config: TrainConfig, first: int) -> None:
        self.file = (out / "metrics.jsonl").open("a", encoding="utf-8")
        self.config = config
        self.bar = tqdm(total=config.steps, initial=first, unit="step", desc=config.name)
        self.started, self.since = time.monotonic(), first

    def step(self, step: int, result: StepResult) -> None:
        self.bar.update()
        if step % self.config.log_every and step != self.config.steps:
            return
        values = {name: float(value) for name, value in result._asdict().items()}
        seconds = time.monotonic() - self.started
        tokens = (step - self.since) * self.config.rows * self.config.row_len
        self.bar.set_postfix(loss=f"{values['loss']:.3f}")
        self.record(step, {**values, "tokens_per_s": round(tokens / seconds)})

    def record(self, step: int, values: dict[str, float]) -> None:
        self.file.write(json.dumps({"step": step, **values}) + "\n")
        self.file.flush()

    def close(self) -> None:
        self.bar.close()
        self.file.close()
