"""Faults planted in a copy of KDA's Triton kernels: each moves a result out of its bound."""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
from triton_faults import plant_in_source

from perilune.kernels.common.cases import FP32
from perilune.kernels.common.packing import Packing
from perilune.kernels.kda import (
    oracle,
    triton,
    triton_backward,
    triton_chunk,
    triton_forward,
    triton_gradients,
    triton_split,
)
from perilune.kernels.testing.compare import compare
from perilune.kernels.testing.run import as_double, run

# The interpreter is numpy, which warns of infinities that a kernel masks afterwards.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

CHUNK, FORWARD, BACKWARD = triton_chunk, triton_forward, triton_backward
GRADIENTS, SPLIT = triton_gradients, triton_split
USERS = (triton, CHUNK, FORWARD, BACKWARD, GRADIENTS, SPLIT)


class Fault(NamedTuple):
    module: ModuleType
    right: str
    wrong: str
    case: str = "bounded"


FAULTS = {
    "padding decays the state": Fault(
        CHUNK, "here_C, lower_bound * LOG2_E, 0.0", "t_C >= 0, lower_bound * LOG2_E, 0.0"
    ),
    "runs of tokens out of order": Fault(
        CHUNK, "(row_C % (C // RUN)) * RUN + row_C // (C // RUN)", "row_C"
    ),
    "sums begin in every run": Fault(CHUNK, "inside_RNK + before_NK[None, :, :]", "inside_RNK"),
    "blocks of 16 not joined": Fault(
        CHUNK, "return _join(X_CC, L_CC, t_C, 16, HALF, PRECISION)", "return X_CC"
    ),
    "the next document is written to": Fault(
        CHUNK,
        "kept_C = tl.where(document_C == final, 1.0, 0.0)",
        "kept_C = here_C * 1.0",
        "documents",
    ),
    "the last document is read": Fault(
        CHUNK,
        "carried_C = tl.where(document_C == before, 1.0, 0.0)",
        "carried_C = here_C * 1.0",
        "documents",
    ),
    "factors beyond every range": Fault(
        CHUNK, "tl.constexpr(116.0)", "tl.constexpr(1e9)", "strong"
    ),
    "a state half as decayed": Fault(
        FORWARD, "keep_K = exp2(2.0 * half_K, PTX)", "keep_K = exp2(half_K, PTX)"
    ),
    "no token reads itself": Fault(
        FORWARD, "valid_CC = t_C[:, None] >= t_C[None, :]", "valid_CC = t_C[:, None] > t_C[None, :]"
    ),
    "beta forgotten": Fault(FORWARD, "X_CC * beta_C[None, :] * over", "X_CC * over"),
    "no score across documents masked": Fault(
        FORWARD, "valid_CC & (document_C[:, None] == document_C[None, :])", "valid_CC", "documents"
    ),
    "initial state forgotten": Fault(
        FORWARD, "S_VK += tl.load(before_p + state_at).to(tl.float32)", "S_VK += 0"
    ),
    "states at cuts in the place of the last": Fault(
        FORWARD, "piece_at = (p * H + h)", "piece_at = (n * H + h)", "cuts"
    ),
    "gradient of what was read lost": Fault(
        BACKWARD, "D_VK = tl.dot(dx, w_CK, D_VK,", "D_VK = tl.dot(dx, 0 * w_CK, D_VK,"
    ),
    "gradient of the final state lost": Fault(
        BACKWARD, "D_VK += tl.load(d_after_p + state_at).to(tl.float32)", "D_VK += 0"
    ),
    "what is written counts twice": Fault(
        GRADIENTS, "tl.load(x_at + tiles * V)", "tl.load(x_at + 0 * tiles)"
    ),
    "what is written stays divided": Fault(
        CHUNK, "by_C = tl.where(some_C, beta_C * rec", "by_C = tl.where(some_C, rec"
    ),
    "beta's slope mirrored": Fault(GRADIENTS, "tl.minimum(-b_C, 80.0)", "tl.minimum(b_C, 80.0)"),
    "reading pushes the wrong way": Fault(GRADIENTS, "* -scale_K[:, None]", "* scale_K[:, None]"),
    "the state's decay has no gradient": Fault(
        GRADIENTS, "last_K *= tl.load(keep_p", "last_K *= 0 * tl.load(keep_p"
    ),
    "keys along their own direction": Fault(
        GRADIENTS, "(dk_CK - tl.sum(dk_CK * k_CK, axis=1)[:, None] * k_CK)", "dk_CK"
    ),
    "queries along their own direction": Fault(
        GRADIENTS, "dq_CK -= (K * tl.sum(dq_CK * q_CK, axis=1))[:, None] * q_CK", "dq_CK *= 1.0"
    ),
    "a gap reaches one token too far": Fault(
        GRADIENTS,
        "tl.where(t_C[:, None] > j, by_gap_CK, 0.0)",
        "tl.where(t_C[:, None] >= j, by_gap_CK, 0.0)",
        "strong",
    ),
    "pieces do not know of each other": Fault(
        SPLIT, "S_VK = tl.dot(S_VK, A_KK, b_VK, input_precision=PRECISION)", "S_VK = b_VK", "split"
    ),
    "a piece without its values": Fault(
        SPLIT,
        "(token_C < end)[:, None] & (v_ >= 0)[None, :]",
        "(token_C < 0)[:, None] & (v_ >= 0)[None, :]",
        "split",
    ),
}


@cache
def inputs(case):
    generator = torch.Generator().manual_seed(5)

    def drawn(*shape, scale=1.0):
        return (scale * torch.randn(*shape, generator=generator)).requires_grad_()

    lengths = (40,) if case in ("split", "documents") else (34, 3)
    t, h, k, v = sum(lengths), 1, 16, 16
    rows = {name: drawn(t, h, k) for name in ("q_THK", "k_THK", "v_THV")}
    # So weak a decay that a chunk still feels the one before, or one that no factor survives.
    z_THK = drawn(t, h, k, scale=30.0) if case == "strong" else (drawn(t, h, k) - 4).detach()
    gate = {"A_log_H": drawn(h, scale=0.5), "dt_bias_HK": drawn(h, k, scale=0.3)}
    made = rows | {"z_THK": z_THK.requires_grad_(), "b_TH": drawn(t, h)} | gate
    made |= {"packing": Packing.of(lengths), "lower_bound": None if case == "strong" else -5.0}
    made |= {"state_NHKV": drawn(len(lengths), h, k, v), "cuts": None}
    if case == "documents":
        documents = (torch.arange(40) >= 36).long() + (torch.arange(40) >= 20).long()
        made |= {"packing": Packing.rows(documents[None]), "state_NHKV": None}
    if case == "cuts":
        made["cuts"] = ((7, 33), (2,))
    return made


@cache
def truth(case):
    return run(oracle.kda_recurrent, as_double(inputs(case)), grad=True)


def found(case):
    """Every comparison of the kernels as they are now with the truth."""
    given = {
        name: x.detach().clone().requires_grad_() if isinstance(x, torch.Tensor) else x
        for name, x in inputs(case).items()
    }
    if case == "split":
        given["segment"] = 32
    got = run(triton.kda_chunk, given, grad=True)
    return list(compare(got, truth(case), FP32[torch.float32]))


@pytest.mark.parametrize("case", sorted({fault.case for fault in FAULTS.values()}))
def test_nothing_is_red_without_a_fault(case):
    assert [each for each in found(case) if not each.error <= each.bound] == []


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_seen(name, tmp_path, monkeypatch):
    fault = FAULTS[name]
    plant_in_source(*fault[:3], USERS, tmp_path, monkeypatch)
    assert any(not each.error <= each.bound for each in found(fault.case))
