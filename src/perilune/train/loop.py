"""The training loop, top to bottom: load, step, log, evaluate, save.

A run folder holds `metrics.jsonl` (a line a logged step), `train_state.safetensors` (resume) and
`model/` (the released layout).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
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
from perilune.train.data import PackedLoader, ValidationSet
from perilune.train.evaluate import evaluate
from perilune.train.optim import build_optimizers
from perilune.train.step import Batch, Stepper, attach_balancers, batch_loss, moe_layers


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
    loader = PackedLoader(
        config.data_dir,
        mixture=config.mixture,
        row_len=config.row_len,
        rows=config.rows,
        seed=config.seed,
    )
    loss_fn = torch.compile(batch_loss, dynamic=False) if config.compile else batch_loss
    stepper = Stepper(model, optimizers, config.optim, config.steps, loss_fn)
    first = 0
    if resume:
        progress = load_state(out, model, optimizers)
        loader.load_state_dict(progress["loader"])
        first = progress["step"]
    log = RunLog(out, config, first)
    for step in range(first, config.steps):
        if step >= config.qat_from * config.steps:
            quantise.switch_on()
        result = stepper(step, to_batch(loader.next_batch(), config.device))
        done = step + 1
        log.step(done, result._asdict())
        if done % config.eval_every == 0 or done == config.steps:
            log.record(done, validation(model, config, loss_fn))
        if done % config.save_every == 0 or done == config.steps:
            save_state(out, model, optimizers, {"step": done, "loader": loader.state_dict()})
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


def validation(
    model: Transformer, config: TrainConfig, loss_fn: Callable[..., Tensor]
) -> dict[str, float]:
    """Bits per byte of each kind of held-out text."""
    scores = {}
    held_out = ValidationSet(config.data_dir, row_len=config.row_len, rows=config.rows)
    for kind in held_out.kinds:
        batches: Iterator[Batch] = (to_batch(b, config.device) for b in held_out.batches(kind))
        score = evaluate(model, batches, loss_fn)
        scores[f"bpb/{kind}"] = score.bits_per_byte(held_out.text_bytes(kind))
    return scores


class RunLog:
    """`metrics.jsonl` and the progress line of a run."""

    def __init__(self, out: Path, config: TrainConfig, first: int) -> None:
        self.file = (out / "metrics.jsonl").open("a", encoding="utf-8")
        self.config = config
        self.bar = tqdm(total=config.steps, initial=first, unit="step", desc=config.name)
        self.started, self.since = time.monotonic(), first

    def step(self, step: int, values: dict[str, float]) -> None:
        self.bar.update()
        if step % self.config.log_every and step != self.config.steps:
            return
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


