"""The training loop, top to bottom: load, step, log, save, evaluate, export.

A run folder holds `metrics.jsonl` (a line a logged step), `curve.png` (drawn from it at every
save), `run.json` (the run's facts), `state-N/` (what step N left, to resume) and at the end
`model/` (the released layout, ready to serve).

Launched by torchrun, every process has its rows of each batch and its part of the parameters.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch

from perilune.core.errors import ConfigError, UnsupportedError
from perilune.model.init import init_weights
from perilune.model.model import Transformer
from perilune.model.parse_config import parse_config
from perilune.train import checkpoint
from perilune.train.config import TrainConfig, differences
from perilune.train.curve import CURVE_FILE, draw_curve
from perilune.train.data import PackedLoader
from perilune.train.evaluate import evaluate, held_out_sets
from perilune.train.export import export
from perilune.train.meter import Meter
from perilune.train.optim import build_optimizers
from perilune.train.parallel import share_out, whole_model
from perilune.train.prefetch import Prefetcher
from perilune.train.profile import profiled
from perilune.train.qat import QuantiseFrom
from perilune.train.recompute import recomputed
from perilune.train.run_facts import facts_of, write_facts
from perilune.train.run_log import METRICS_FILE, RunLog, read_metrics
from perilune.train.shards import check_files, fingerprint, load_shard
from perilune.train.step import (
    DeviceBatch,
    LossFunction,
    Stepper,
    batch_loss,
    moe_layers,
)
from perilune.train.team import ALONE, Team, gathered


def train(
    config: TrainConfig,
    *,
    resume: bool = False,
    stop_after_s: float | None = None,
    is_stopped: Callable[[], bool] = lambda: False,
    profile_steps: int = 0,
) -> Path | None:
    """Runs `config` to its last step and returns the checkpoint directory.

    `resume` goes on from the last save, and ends with the same bits as an uninterrupted run. The
    first step that ends later than `stop_after_s`, or after which `is_stopped()`, is saved and the
    last one of this call; None is returned if others are left. `profile_steps` steps near the
    beginning are profiled into the folder `profile` of the run.

    Raises:
        ConfigError: the run folder holds a run already (without `resume`) or one of another recipe
            (with it), or data is missing.
        CheckpointError: `resume` without a state, or with one of another model.
        UnsupportedError: this machine does not have the device.
        NonFiniteError: a weight, the loss or a gradient stopped being finite.
        LossSpikeError: the loss jumped up and stayed there.
    """
    with gathered(config.device, config.expert_ranks) as team:
        return _train(config, team, resume, stop_after_s, is_stopped, profile_steps)


def _train(
    config: TrainConfig,
    team: Team,
    resume: bool,
    stop_after_s: float | None,
    is_stopped: Callable[[], bool],
    profile_steps: int,
) -> Path | None:
    stop_at = float("inf") if stop_after_s is None else time.monotonic() + stop_after_s
    out = Path(config.out_dir)
    _check(config, team, out, resume)
    data = _checked_data(config, team, resume)
    loader = open_loader(config)
    model = build_model(config)
    quantise = QuantiseFrom(config.device)
    for layer in moe_layers(model):
        layer.quantize = quantise
    loss_fn = _loss_function(model, config, team)
    optimizers = build_optimizers(model, config.optim)
    stepper = Stepper(model, optimizers, config, loss_fn, team)
    first, seconds = 0, 0.0
    if resume:
        progress = checkpoint.read_progress(out)
        checkpoint.load_state(out, model, optimizers)
        loader.load_state_dict(progress.loader)
        first, seconds = progress.step, progress.seconds
        stepper.guard.losses.extend(progress.losses)
    out.mkdir(parents=True, exist_ok=True)
    meter, trace = Meter(config, team), out / "profile"
    with (
        RunLog(out, config, first, seconds, team) as log,
        Prefetcher(loader) as batches,
        profiled(trace, profile_steps if team.rank == 0 else 0) as profile_step,
    ):
        for step in range(first, config.steps):
            if step >= config.qat_from * config.steps:
                quantise.switch_on()
            meter.start()
            batch = next(batches)
            result = stepper(step, DeviceBatch.of(batch, config.device, team))
            meter.stop(batch)
            profile_step()
            done = step + 1
            log.step(done, result, meter)
            is_last = done == config.steps
            if config.eval_every and (done % config.eval_every == 0 or is_last):
                log.record(done, validate(model, config, loss_fn, team))
            is_late = team.any(is_stopped() or time.monotonic() >= stop_at, config.device)
            if done % config.save_every == 0 or is_last or is_late:
                # The log first: a state must not be ahead of its lines.
                log.sync()
                progress = checkpoint.Progress(
                    step=done,
                    seconds=log.seconds(),
                    loader=batches.state_dict(),
                    recipe=config.as_json(),
                    losses=list(stepper.guard.losses),
                    data=data,
                )
                checkpoint.save_state(out, model, optimizers, progress, team)
                if team.rank == 0:
                    epochs = loader.epochs(progress.loader)
                    write_facts(out, facts_of(config, team.size, progress, epochs))
                    draw_curve(read_metrics(out / METRICS_FILE), out / CURVE_FILE)
            if is_late and not is_last:
                return None
    whole = model if team.size == 1 else whole_model(model, team)
    if whole is not None:
        export(whole, config)
    team.wait()
    return out / "model"


def _check(config: TrainConfig, team: Team, out: Path, resume: bool) -> None:
    if config.device.startswith("cuda") and not torch.cuda.is_available():
        raise UnsupportedError(f"recipe {config.name} trains on {config.device}: no GPU here")
    parts = team.size * config.micro_batches
    if config.rows % parts:
        raise ConfigError(
            f"{config.rows} rows are no equal parts for {parts} ranks x micro-batches"
        )
    for key, is_set in (("recompute", config.recompute), ("several ranks", team.size > 1)):
        if config.compile and is_set:
            raise ConfigError(f"{key}: not with a compiled loss, set compile=false")
    state = checkpoint.latest(out)
    if not resume and state is not None:
        raise ConfigError(f"{out} holds a run already: resume it, or choose another folder")
    if resume:
        changed = differences(checkpoint.read_progress(out).recipe, config.as_json())
        if changed:
            raise ConfigError(f"{out} is a run of another recipe: {'; '.join(changed)}")


def _checked_data(config: TrainConfig, team: Team, resume: bool) -> str:
    """The fingerprint of the data, whose files are what they were."""
    folder = Path(config.data_dir)
    data = fingerprint(folder)
    if resume and checkpoint.read_progress(Path(config.out_dir)).data != data:
        raise ConfigError(f"{folder} holds other data than {config.out_dir} was trained on so far")
    if team.rank == 0:
        check_files(folder, [f"train_{kind}" for kind in config.mixture])
    return data


def build_model(config: TrainConfig) -> Transformer:
    """The recipe's model with fresh weights (from the seed)."""
    model = Transformer(parse_config(config.model, f"recipe {config.name}"))
    init_weights(model, torch.Generator().manual_seed(config.seed))
    model.to(config.device).train()
    model.model.compute_dtype = getattr(torch, config.compute_dtype)
    if config.recompute:
        model.model.run_layer = recomputed
    return model


def open_loader(config: TrainConfig) -> PackedLoader:
    """The recipe's mixture, from its shards, at the start of its first epoch."""
    folder = Path(config.data_dir)
    return PackedLoader(
        {kind: load_shard(folder, f"train_{kind}") for kind in config.mixture},
        config.mixture,
        batch_rows=config.rows,
        row_len=config.row_len,
        pad_id=_pad_id(config),
        seed=config.seed,
    )


def _pad_id(config: TrainConfig) -> int:
    return parse_config(config.model).pad_token_id or 0


def _loss_function(model: Transformer, config: TrainConfig, team: Team) -> LossFunction:
    """The loss to train; shares the model out among the ranks first."""
    if team.size > 1:
        root = share_out(model, team)
        return lambda _, batch: root(batch)
    if not config.compile:
        return batch_loss
    from perilune.train.compile import compile_loss  # the compiler takes seconds to import

    return compile_loss(model)


def validate(
    model: Transformer,
    config: TrainConfig,
    loss_fn: LossFunction = batch_loss,
    team: Team = ALONE,
) -> dict[str, float]:
    """Bits per byte of each kind of held-out text. Not compiled: it runs too rarely to pay."""
    scores = {}
    eager = torch.compiler.set_stance("force_eager") if config.compile else nullcontext()
    with eager:
        for kind, text_bytes, batches in held_out_sets(
            Path(config.data_dir), config.row_len, config.rows, _pad_id(config)
        ):
            on_device = (DeviceBatch.of(batch, config.device, team) for batch in batches)
            score = evaluate(model, on_device, loss_fn)
            nats = team.sum(torch.tensor(score.nats, dtype=torch.float64, device=config.device))
            scores[f"bpb/{kind}"] = score._replace(nats=float(nats)).bits_per_byte(text_bytes)
    return scores
