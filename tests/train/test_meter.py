"""Model FLOPs by arithmetic, and what a run says of its speed."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from perilune.kernels.common.packing import Packing
from perilune.model.init import random_weights
from perilune.model.model import Transformer
from perilune.model.parse_config import parse_config
from perilune.model.presets import preset, tiny_k3
from perilune.train import flops, meter
from perilune.train.data import PADDING, Batch
from perilune.train.flops import model_flops, peak_flops, tokens_and_pairs
from perilune.train.loop import train
from perilune.train.meter import Meter
from perilune.train.run_log import read_metrics


def batch_of(segments):
    segments_BL = np.array(segments, np.int32)
    return Batch(np.zeros_like(segments_BL), np.zeros_like(segments_BL), segments_BL)


def test_pairs_end_at_documents_and_padding():
    batch = batch_of([[0, 0, 0, 1, 1, PADDING], [0, 0, 0, 0, 0, 0]])
    assert tokens_and_pairs(batch) == (11, (6 + 3) + 21)


def test_flops_of_k3_are_six_a_parameter_and_what_mixes_tokens():
    k3 = model_flops(preset("kimi-k3"))
    kda = 69 * 96 * 128 * 128 * 7
    assert k3.per_token == pytest.approx(6 * 104.19e9 + 3 * kda, rel=1e-4)
    assert k3.per_pair == 3 * 24 * 96 * 2 * (192 + 128)


def test_products_of_a_dense_model_are_those_that_torch_counts():
    """A whole forward and backward pass but for what mixes tokens, embedding and norms aside."""
    text = {"num_hidden_layers": 4, "num_experts": 1, "num_experts_per_token": 1}
    config = parse_config(tiny_k3(**text))
    model = random_weights(Transformer(config), torch.Generator().manual_seed(0))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.arange(1, 65), Packing.of([64]))
    counted = model_flops(config)
    expected = (counted.per_token * 64 + counted.per_pair * 64 * 65 // 2) / 3
    # Torch does not count elementwise loops (KDA's gates), nor leave out what is masked.
    assert 0.8 < counter.get_total_flops() / expected < 1.35


def test_utilisation_is_of_all_ranks_and_of_the_time_inside_steps(tiny_run, monkeypatch):
    clock = iter([0.0, 10.0, 12.0, 50.0, 53.0])
    monkeypatch.setattr(meter.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(meter, "peak_flops", lambda device, dtype: 1e6)
    of_a_run = Meter(tiny_run)
    batch = batch_of([[0] * 20 + [PADDING] * 44])
    for _ in range(2):
        of_a_run.start()
        of_a_run.stop(batch)
    done = 2 * model_flops(parse_config(tiny_run.model)).of(batch)
    assert of_a_run.read() == {
        "tokens_per_s": 8.0,
        "tflops": round(done / 5 / 1e12, 4),
        "mfu": round(done / 5 / 1e6, 4),
    }


def test_a_peak_is_told_only_where_it_is_known(monkeypatch):
    monkeypatch.setattr(flops.torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    assert peak_flops("cuda", "bfloat16") == 989.5e12
    assert peak_flops("cuda", "float32") is None
    assert peak_flops("cpu", "bfloat16") is None
    monkeypatch.setattr(flops.torch.cuda, "get_device_name", lambda _: "Some GPU")
    assert peak_flops("cuda", "bfloat16") is None


def test_a_run_logs_its_speed_draws_its_curve_at_every_save_and_is_profiled(tiny_run):
    config = replace(tiny_run, steps=4, eval_every=0)
    out = Path(config.out_dir)
    assert train(config, stop_after_s=0) is None
    assert (out / "curve.png").read_bytes().startswith(b"\x89PNG")
    train(config, resume=True, profile_steps=1)
    line = read_metrics(out / "metrics.jsonl")[-1]
    assert line["tokens_per_s"] > 0
    assert line["tflops"] > 0
    assert "mfu" not in line
    assert json.loads((out / "profile" / "trace.json").read_text())["traceEvents"]
    assert "aten::mm" in (out / "profile" / "operators.txt").read_text()
