"""Attention of torch and FlashAttention 3 as peers of prefill.

They take whole keys for every head, so that bringing the shared channels to the heads is part of
what is timed. torch's SDPA serves sequences of one length; of several lengths it is called once
each. FlashAttention 2 has one width, so that values are padded.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from perilune.core.errors import UnsupportedError
from perilune.kernels.bench.cases import Bound, Peer
from perilune.kernels.bench.inputs import projection
from perilune.kernels.mla.reference import with_shared
from perilune.kernels.registry import Inputs

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def _torch(name: str, function: str) -> Peer:
    return Peer(name=name, distribution="torch", module="torch", bind=f"{__name__}:{function}")


CUDNN = _torch("torch SDPA cuDNN", "cudnn")
FLASH = _torch("torch SDPA flash (v padded)", "flash")
FLASH_3 = Peer(
    name="FlashAttention 3",
    distribution="flash_attn_3",
    module="flash_attn_interface",
    bind=f"{__name__}:flash_3",
)


def cudnn(inputs: Inputs, backward: bool) -> Bound:
    return _sdpa(inputs, backward, SDPBackend.CUDNN_ATTENTION, padded=False)


def flash(inputs: Inputs, backward: bool) -> Bound:
    return _sdpa(inputs, backward, SDPBackend.FLASH_ATTENTION, padded=True)


def _sdpa(inputs: Inputs, backward: bool, backend: SDPBackend, *, padded: bool) -> Bound:
    packing, scale = inputs["packing"], inputs["scale"]
    _require_no_front(inputs)

    def rows(q_BHLK: Tensor, k_BHLK: Tensor, v_BHLV: Tensor) -> Tensor:
        width = v_BHLV.shape[-1]
        v = functional.pad(v_BHLV, (0, q_BHLK.shape[-1] - width)) if padded else v_BHLV
        attention = functional.scaled_dot_product_attention
        return attention(q_BHLK, k_BHLK, v, is_causal=True, scale=scale)[..., :width]

    def attend(q_THK: Tensor, k_THK: Tensor, v_THV: Tensor) -> Tensor:
        tensors = (q_THK, k_THK, v_THV)
        with sdpa_kernel(backend):
            if packing.is_dense:
                o = rows(*(packing.to_rows(x).transpose(1, 2) for x in tensors))
                return packing.from_rows(o.transpose(1, 2))
            parts = zip(
                *(x.transpose(0, 1).split(packing.lengths, 1) for x in tensors), strict=True
            )
            outputs = [rows(*(x[None] for x in part))[0] for part in parts]
            return torch.cat(outputs, 1).transpose(0, 1)

    return _bound(inputs, backward, attend)


def flash_3(inputs: Inputs, backward: bool) -> Bound:
    run = import_module("flash_attn_interface").flash_attn_varlen_func
    packing, scale = inputs["packing"], inputs["scale"]
    _require_no_front(inputs)
    ends = torch.tensor(packing.cu_seqlens, dtype=torch.int32, device=inputs["q_THK"].device)

    def attend(q_THK: Tensor, k_THK: Tensor, v_THV: Tensor) -> Tensor:
        longest = packing.max_len
        out = run(
            q_THK,
            k_THK,
            v_THV,
            cu_seqlens_q=ends,
            cu_seqlens_k=ends,
            max_seqlen_q=longest,
            max_seqlen_k=longest,
            softmax_scale=scale,
            causal=True,
        )
        return out if isinstance(out, Tensor) else out[0]

    return _bound(inputs, backward, attend)


def _require_no_front(inputs: Inputs) -> None:
    if inputs.get("keys") is not None:
        raise UnsupportedError("keys in front are not called for")


def _bound(inputs: Inputs, backward: bool, attend: Attend) -> Bound:
    """With `backward`, gradients of the four operands after the output."""
    leaves = [inputs[name] for name in ("q_THK", "k_SHN", "shared_SR", "v_SHV")]
    grad_outputs: list[Tensor] = []

    def call() -> Tensor:
        q_THK, k_SHN, shared_SR, v_SHV = leaves
        o_THV = attend(q_THK, with_shared(k_SHN, shared_SR), v_SHV)
        if backward:
            if not grad_outputs:
                grad_outputs.append(projection(o_THV.detach()))
            torch.autograd.grad([o_THV], leaves, grad_outputs)
        return o_THV

    return Bound(call, lambda o_THV: [o_THV.detach()])
