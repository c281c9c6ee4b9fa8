"""The bundled model: minutes on one GPU; and the same code at toy size, on text made here."""

from __future__ import annotations

from perilune.model.presets import nano as nano_model
from perilune.model.presets import tiny_k3
from perilune.train.config import OptimConfig, TrainConfig

MIXTURE = {"chat": 0.42, "code": 0.25, "prose": 0.17, "synthetic": 0.16}


def nano() -> TrainConfig:
    """Nine minutes on one H200, compilation included."""
    return TrainConfig(
        name="nano",
        model=nano_model(),
        data_dir="data/nano",
        tokenizer_dir="models/nano",
        mixture=MIXTURE,
        out_dir="runs/nano",
        steps=2254,
        rows=64,
        row_len=1024,
        qat_from=0.6,
        device="cuda",
        compute_dtype="bfloat16",
        compile=True,
        eval_every=750,
        save_every=750,
        optim=OptimConfig(peak_lr=3e-3),
    )


def nano_toy() -> TrainConfig:
    """Two minutes of one core: the moving parts of `nano` without its size, on generated text."""
    special = {key: value for key, value in nano_model().items() if key.endswith("_token_id")}
    return TrainConfig(
        name="nano-toy",
        model=tiny_k3(vocab_size=6144, mxfp4=True) | special,
        data_dir="data/nano-toy",
        tokenizer_dir="models/nano",
        mixture={"synthetic": 1.0},
        out_dir="runs/nano-toy",
        steps=100,
        rows=4,
        row_len=256,
        threads=1,  # on matrices this small two threads lose to one
        eval_every=50,
        save_every=25,
        log_every=1,
        optim=OptimConfig(peak_lr=1e-2, warmup_steps=10),
    )
