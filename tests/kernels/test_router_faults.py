"""Faults planted in a copy of the router's Triton kernels: each changes what comes out of them."""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

import pytest
import torch
from triton_faults import plant_in_source

from perilune.kernels.router import (
    permutation,
    reference,
    triton,
    triton_backward,
    triton_forward,
    triton_permute,
    triton_scores,
)
from perilune.kernels.testing.memory import NewMemory

FORWARD, BACKWARD = triton_forward, triton_backward
PERMUTE, SCORES = triton_permute, triton_scores
USERS = (triton, FORWARD, BACKWARD, PERMUTE, SCORES)


class Fault(NamedTuple):
    module: ModuleType
    right: str
    wrong: str
    case: str = "plain"


FAULTS = {
    "the higher of two equal lanes": Fault(
        FORWARD,
        "tl.min(tl.where(best_GM == best_M[None, :], at_GM, BN * CHUNK), axis=0)",
        "tl.max(tl.where(best_GM == best_M[None, :], at_GM, -1), axis=0)",
        "tied",
    ),
    "the last of a lane's equals": Fault(
        FORWARD,
        "tl.min(tl.min(first_GMNJ, axis=3), axis=2)",
        "tl.max(tl.max(tl.where(is_best_GMNJ, first_GMNJ, -1), axis=3), axis=2)",
        "tied",
    ),
    "equals come again": Fault(
        FORWARD, "(e_LM > chosen_M[None, :])", "(e_LM != chosen_M[None, :])", "tied"
    ),
    "equals are lost": Fault(FORWARD, " | (is_equal_LM & (e_LM > chosen_M[None, :]))", "", "tied"),
    "a group is as it was": Fault(
        FORWARD, "tl.where(is_group_GM, next_best_M[None, :], best_GM)", "best_GM"
    ),
    "the next one's place is not kept": Fault(
        FORWARD, "tl.where(is_group_GM, next_at_M[None, :], at_GM)", "at_GM"
    ),
    "absent experts compete": Fault(
        FORWARD,
        "tl.where(is_left_LM & (e_LM < E), key_LM, NONE)",
        "tl.where(is_left_LM, key_LM, NONE)",
        "all",
    ),
    "absent experts lead": Fault(
        FORWARD,
        'tl.where(here_GMNJ, score_GMNJ + bias_GMNJ, -float("inf"))',
        "score_GMNJ + bias_GMNJ",
        "all",
    ),
    "a bias in bf16": Fault(
        FORWARD,
        "bias_GMNJ = tl.load(bias_p + e_GMNJ, mask=here_GMNJ, other=0.0).to(tl.float32)",
        "bias_GMNJ = tl.load(bias_p + e_GMNJ, mask=here_GMNJ, other=0.0)"
        ".to(tl.bfloat16).to(tl.float32)",
        "close biases",
    ),
    "logits in bf16": Fault(
        FORWARD,
        "mask=e_LM < E, other=0.0).to(tl.float32)\n        bias_LM",
        "mask=e_LM < E, other=0.0).to(tl.bfloat16).to(tl.float32)\n        bias_LM",
        "close logits",
    ),
    "negatives in reverse": Fault(
        SCORES, "order = bits ^ ((bits >> 31) & 0x7FFFFFFF)", "order = bits", "negative"
    ),
    "no limit of the exponent": Fault(SCORES, "tl.constexpr(87.0)", "tl.constexpr(8.0)", "far"),
    "a token beyond the last counts": Fault(
        FORWARD, "is_counted_M = is_token_M", "is_counted_M = row_M >= 0", "counted"
    ),
    "NaN loses": Fault(
        SCORES,
        "tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)",
        "tl.maximum(x, y)",
        "no number",
    ),
    "alpha is the last chosen": Fault(
        FORWARD,
        "alpha_M = sorted_back(tl.max(best_GM, axis=0))",
        "alpha_M = sorted_back(best_M)",
        "counted",
    ),
    "biased scores are counted": Fault(
        FORWARD, "- score_GMNJ\n", "- score_GMNJ - bias_GMNJ\n", "counted"
    ),
    "a grid that is too short": Fault(FORWARD, "+ 1.0 - low) / B", "- low) / B", "counted"),
    "padding is counted": Fault(
        FORWARD, "tl.load(counted_p + row_M) != 0", "row_M >= 0", "counted"
    ),
    "a gradient without the total": Fault(
        BACKWARD, "ds_R -= tl.sum(ds_R * (score_R / total), axis=0)", "ds_R -= 0.0"
    ),
    "a gradient not renormalised": Fault(BACKWARD, "scale = scale / total", "scale = scale"),
    "a gradient of scores": Fault(BACKWARD, "(score_R * (1.0 - score_R))", "1.0"),
    "others' gradients are as found": Fault(
        BACKWARD, "tl.store(dlogits_p + e_, tl.zeros([BE], dtype), mask=e_ < E)", "pass"
    ),
    "words are as found": Fault(
        PERMUTE, "tl.store(at_EW, tl.zeros([BE, W], tl.int32), mask=e_ < E)", "pass", "few"
    ),
    "a pair counts itself": Fault(PERMUTE, "<< (t_P % WORD)) - 1", "<< (t_P % WORD))", "few"),
    "words before are forgotten": Fault(
        PERMUTE,
        "first_EW = start_E[:, None] + tl.cumsum(load_EW, axis=1) - load_EW",
        "first_EW = start_E[:, None] + load_EW * 0",
        "few",
    ),
    "lower experts are forgotten": Fault(
        PERMUTE, "lower + tl.cumsum(load_E, axis=0)", "tl.cumsum(load_E, axis=0)", "few"
    ),
    "nobody's lead": Fault(
        PERMUTE,
        "((expert_P >= 0) & (expert_P < program * EG))",
        "(expert_P < program * EG)",
        "few",
    ),
    "a place that is left over": Fault(
        PERMUTE, "mask=(p_P >= placed)", "mask=(p_P > placed)", "few"
    ),
    "a block counts itself": Fault(
        PERMUTE, "b_ < block, more_BE", "b_ <= block, more_BE", "blocks"
    ),
    "words of a block are alone": Fault(
        PERMUTE,
        "first_EW = tl.cumsum(load_EW, axis=1) - load_EW",
        "first_EW = load_EW * 0",
        "blocks",
    ),
    "blocks overlap": Fault(
        PERMUTE, "p_ = tl.where(i_ < W * WORD * R, p_, num_pairs)", "p_ += 0", "blocks"
    ),
}


def drawn(*shape, seed=0, scale=1.0):
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def steps(count, seed):
    return drawn(count, seed=seed).argsort().float()


LOGITS = {
    "plain": lambda: (drawn(3, 40, scale=2.0) - 2, drawn(40, seed=1, scale=0.3) - 0.5, 7),
    "tied": lambda: (drawn(2, 300).mul(2).round(), torch.zeros(300), 20),
    "all": lambda: (drawn(2, 5) - 3, torch.tensor([-1.0, -1.0, -1.0, -1.0, 2.0]), 5),
    "close biases": lambda: (torch.zeros(2, 64), 8.0 + 1e-3 * steps(64, 2), 8),
    "close logits": lambda: (2.0 + 1e-4 * steps(64, 3)[None], torch.zeros(64), 8),
    "negative": lambda: (drawn(2, 40), drawn(40, seed=1) - 5, 6),
    "no number": lambda: (
        drawn(2, 40).index_fill(1, torch.tensor(33), torch.nan),
        torch.zeros(40),
        6,
    ),
    "far": lambda: (drawn(2, 40) - 20, torch.zeros(40), 6),
    "counted": lambda: (drawn(3, 40), drawn(40, seed=1, scale=0.3), 6),
}


def chosen(case):
    """A choice, its gradient, and what is counted."""

    def results(route):
        logits, bias, active = LOGITS[case]()
        counters = [torch.zeros(40, 30).int(), torch.zeros(40).int(), torch.arange(3) != 1]
        leaf = logits.requires_grad_()
        with NewMemory(poisoned=True):
            routes = route(leaf, bias, active, True, 1.5, *counters * (case == "counted"))
            routes.weight_TR.backward(drawn(*routes.weight_TR.shape, seed=5))
        return [*routes, leaf.grad, *counters[:2]]

    return results(triton.route), results(reference.route)


def grouped(case):
    tokens, experts, active = {"few": (70, 9, 3), "blocks": (300, 9, 3)}[case]
    generator = torch.Generator().manual_seed(4)
    expert_TR = torch.rand(tokens, experts, generator=generator).argsort(1)[:, :active]
    expert_TR[expert_TR == 2] = -1
    with NewMemory(poisoned=True):
        got = triton.permute(expert_TR, experts)
    return list(got), list(permutation.permute(expert_TR, experts))


def is_right(case):
    pairs = zip(*(chosen if case in LOGITS else grouped)(case), strict=True)
    return all(torch.allclose(a, b, rtol=1e-5, atol=1e-7, equal_nan=True) for a, b in pairs)


@pytest.mark.parametrize("case", sorted({fault.case for fault in FAULTS.values()}))
def test_nothing_is_wrong_without_a_fault(case):
    assert is_right(case)


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_seen(name, tmp_path, monkeypatch):
    fault = FAULTS[name]
    plant_in_source(*fault[:3], USERS, tmp_path, monkeypatch)
    assert not is_right(fault.case)
