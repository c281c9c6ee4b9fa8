"""Two ranks come to the same biases as one, bit by bit, with one message of integers a step."""

import subprocess
import sys
from pathlib import Path

import torch

RUN = Path(__file__).with_name("balance_ranks.py")


def test_two_ranks_equal_one(tmp_path):
    subprocess.run([sys.executable, RUN, tmp_path], check=True)
    alone = torch.load(tmp_path / "alone")
    for rank in range(2):
        found, sent = torch.load(tmp_path / str(rank))
        for rule, steps in alone.items():
            assert steps[0].abs().max() > 0
            assert torch.equal(found[rule], steps), rule
        assert sent == {"torch.int32": sum(map(len, alone.values()))}
