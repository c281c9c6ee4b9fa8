"""Stand-ins for fla-core and FlashKDA, with their signatures, that answer with the truth."""

from __future__ import annotations

import torch

from perilune.kernels.bench.inputs import Copies
from perilune.kernels.bench.peers import ready
from perilune.kernels.bench.verify import Truth
from perilune.kernels.common.cases import FP32
from perilune.kernels.common.packing import Packing
from perilune.kernels.kda.reference import kda_chunk, kda_decode

called: list[dict[str, object]] = []


def packed(q, k, v, g, beta, A_log, dt_bias, lower_bound, state_NHKV, cu_seqlens):
    b, length = q.shape[:2]
    packing = Packing.of((length,) * b)
    if cu_seqlens is not None:
        assert b == 1
        packing = Packing.from_cu_seqlens(cu_seqlens.tolist())
    flat = [x.flatten(0, 1) for x in (q, k, v, g, beta)]
    out = kda_chunk(*flat, A_log, dt_bias, packing, lower_bound, state_NHKV)
    return out.o_THV.unflatten(0, (b, length)), out.state_NHKV


def fake_chunk_kda(
    q,
    k,
    v,
    g,
    beta,
    scale=None,
    initial_state=None,
    output_final_state=False,
    use_qk_l2norm_in_kernel=False,
    use_gate_in_kernel=False,
    use_beta_sigmoid_in_kernel=False,
    safe_gate=False,
    lower_bound=None,
    disable_recompute=False,
    state_v_first=False,
    cu_seqlens=None,
    cu_seqlens_cpu=None,
    *,
    A_log,
    dt_bias,
):
    called.append(locals().copy())
    assert use_qk_l2norm_in_kernel
    assert use_gate_in_kernel
    assert use_beta_sigmoid_in_kernel
    assert output_final_state
    assert safe_gate
    assert scale == q.shape[-1] ** -0.5
    assert dt_bias.shape == (q.shape[2] * q.shape[3],)
    bias_HK = dt_bias.view(q.shape[2:])
    return packed(q, k, v, g, beta, A_log, bias_HK, lower_bound, initial_state, cu_seqlens)


def fake_fused_recurrent_kda_fwd(
    q,
    k,
    v,
    g,
    beta,
    A_log=None,
    dt_bias=None,
    initial_state=None,
    scale=None,
    output_final_state=False,
    inplace_final_state=True,
    use_qk_l2norm_in_kernel=False,
    use_gate_in_kernel=False,
    use_beta_sigmoid_in_kernel=False,
    lower_bound=None,
    out=None,
):
    assert inplace_final_state
    assert use_qk_l2norm_in_kernel
    assert use_gate_in_kernel
    assert use_beta_sigmoid_in_kernel
    bias_HK = dt_bias.view(q.shape[2:])
    tokens = [x[:, 0] for x in (q, k, v, g, beta)]
    out[:, 0] = kda_decode(*tokens, A_log, bias_HK, initial_state, lower_bound)
    return out, initial_state


def fake_fwd(
    q,
    k,
    v,
    g,
    beta,
    scale,
    out,
    A_log,
    dt_bias,
    lower_bound,
    initial_state=None,
    final_state=None,
    cu_seqlens=None,
):
    assert all(x.is_contiguous() for x in (q, k, v, g, beta, out, A_log, dt_bias, final_state))
    state_NHKV = None if initial_state is None else initial_state.mT
    o, state = packed(q, k, v, g, beta, A_log, dt_bias, lower_bound, state_NHKV, cu_seqlens)
    out.copy_(o)
    final_state.copy_(state.mT)


def truth(reference, mutated=(), backward=False):
    return Truth(
        reference=reference,
        tolerance=FP32[torch.float32],
        mutated=frozenset(mutated),
        backward=backward,
        excerpt=None,
    )


def bound(peer, case, of):
    copies = Copies(case, torch.device("cpu"))
    copies.rotate_beyond(0)
    return ready(peer, case, copies, of)
