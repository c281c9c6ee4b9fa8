"""Every family of property checks, and every bug input, turns red for a fault planted for it.

A fault stands in for a reference or a backend, and is right on most inputs: it is the property that
gives it away.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor

from perilune.kernels.common.few_tokens import MAX_TOKENS
from perilune.kernels.common.packing import Packing
from perilune.kernels.kda import reference as kda
from perilune.kernels.registry import load_attr, spec
from perilune.kernels.router import tally
from perilune.kernels.testing import check_properties
from perilune.kernels.testing.bugs import BUGS
from perilune.kernels.testing.properties import FAMILIES
from perilune.kernels.testing.source import offences

Run = Callable[..., Any]
TRUTHS: dict[Any, Any] = {}


class Fault(NamedTuple):
    name: str
    op: str
    reveals: tuple[str, ...]
    """Families, or bug inputs by their number."""
    run: Run
    backend: str = "reference"


def right(op: str, backend: str = "reference") -> Run:
    declared = spec(op)
    return load_attr(declared.backends.get(backend, declared.reference))


def changed(name: str, op: str, reveals: str, change: Callable[..., Any], **more: str) -> Fault:
    """The right implementation with `change(out, **arguments)` for its output."""
    run = right(op, **more)
    return Fault(name, op, tuple(reveals.split(", ")), lambda **x: change(run(**x), **x), **more)


def fed(name: str, op: str, reveals: str, change: Callable[..., dict[str, Any]]) -> Fault:
    """The reference on other arguments: `change(**arguments)` in their place."""
    run = right(op)
    return Fault(name, op, tuple(reveals.split(", ")), lambda **x: run(**x | change(**x)))


def inside(name: str, op: str, reveals: str, attr: str, wrong: Run) -> Fault:
    """The reference of KDA with another function in place of one of its own."""

    def run(**x: Any) -> Any:
        with mock.patch.object(kda, attr, wrong):
            return right(op)(**x)

    return Fault(name, op, tuple(reveals.split(", ")), run)


def as_if_contiguous(x: Tensor) -> Tensor:
    """What a kernel reads that takes no strides."""
    strides = torch.empty(x.shape, device="meta").stride()
    return x.as_strided(x.shape, strides, x.storage_offset())


def behind(x: Tensor) -> Tensor:
    """Next to nothing, unless what lies behind `x` in memory is huge."""
    storage, end = x.untyped_storage(), x.storage_offset() + x.numel()
    whole = x.detach().new_empty(0).set_(storage)
    return 1e-30 * whole[end : end + 1].sum()


def last_token(factor: float, when: Callable[[int], bool]) -> Run:
    """The last output of KDA is off where there are so many tokens."""

    def change(out: kda.KDAOut, q_THK: Tensor, **_: Any) -> kda.KDAOut:
        t = q_THK.shape[0]
        weight = torch.ones(t, 1, 1)
        weight[-1] = factor if when(t) else 1
        return out._replace(o_THV=out.o_THV * weight)

    return change


def state_of(factor: float, when: Callable[[int], bool]) -> Run:
    def change(out: kda.KDAOut, q_THK: Tensor, **_: Any) -> kda.KDAOut:
        return out._replace(state_NHKV=out.state_NHKV * (factor if when(q_THK.shape[0]) else 1))

    return change


def pairwise(clamp: float | None) -> Run:
    """Decays between every two tokens of a chunk, masked only afterwards."""

    def scores(x: Tensor, k: Tensor, decay: Tensor, bounded: bool) -> Tensor:
        gap = decay[..., :, None, :] - decay[..., None, :, :]
        return torch.einsum("...ik,...jk,...ijk->...ij", x, k, gap.to(x.dtype).exp())

    return scores


def not_rebased(x: Tensor, k: Tensor, decay: Tensor, bounded: bool) -> Tensor:
    grow, fade = (-decay).exp().to(x.dtype), decay.exp().to(x.dtype)
    return (x * fade) @ (k * grow).mT


def ones_for_padding(x_BLH: Tensor) -> Tensor:
    pad = -x_BLH.shape[1] % kda.CHUNK
    ones = 0.1 * x_BLH.new_ones(x_BLH.shape[0], pad, *x_BLH.shape[2:])
    x_BLH = torch.cat([x_BLH, ones], dim=1)
    b, length = x_BLH.shape[:2]
    return x_BLH.view(b, length // kda.CHUNK, kda.CHUNK, *x_BLH.shape[2:]).movedim(3, 1)


def base_two_beyond_128(z: Tensor, A_log_H: Tensor, bound: float | None) -> Tensor:
    return GATE(z, A_log_H, bound) * (0.6931 if z.shape[0] == 129 else 1)


GATE = kda.gate


def joined(op: str) -> Run:
    """Sequences one after another as if they were one."""
    state = "window_NWC" if op == "causal_conv" else "state_NHKV"

    def run(**x: Any) -> Any:
        n, t = x["packing"].num_sequences, x["packing"].num_tokens
        if x[state] is not None:
            x[state] = x[state][:1]
        out = right(op)(**x | {"packing": Packing.of([t])})
        return type(out)(out[0], out[1].expand(n, *out[1].shape[1:]).contiguous())

    return run


def attended_jointly(**x: Any) -> Tensor:
    return right("mla_prefill")(**x | {"packing": Packing.of([x["packing"].num_tokens])})


def peeks(out: Any, x_TC: Tensor, **_: Any) -> Any:
    """A ten-millionth of the next token: within every tolerance."""
    return out._replace(y_TC=out.y_TC + 1e-7 * torch.cat([x_TC[1:], 0 * x_TC[:1]]))


def unwritten(op: str) -> Run:
    """The last of 17 tokens, or of 5, is whatever the memory held."""

    def run(**x: Any) -> Any:
        out = right(op)(**x)
        y = out[0] if isinstance(out, tuple) else out
        if y.shape[0] not in (17, 5):
            return out
        written = torch.empty_like(y)
        written[:-1] = y[:-1]
        return type(out)(written, out[1]) if isinstance(out, tuple) else written

    return run


def without_tokens(op: str, value: float, when: Callable[[Packing], bool]) -> Run:
    """The state of a sequence without a token is lost (0), or whatever the memory held (NaN)."""

    def run(**x: Any) -> Any:
        out = right(op)(**x)
        if not when(x["packing"]):
            return out
        # As memory that was just allocated: NaN, where a check sees to that.
        lost = torch.empty_like(out[1]) if value != value else torch.zeros_like(out[1])
        here_N = torch.tensor(x["packing"].lengths) > 0
        return type(out)(
            out[0], torch.where(here_N.view(-1, *[1] * (lost.dim() - 1)), out[1], lost)
        )

    return run


def among_others(packing: Packing) -> bool:
    return packing.num_tokens > 0 and 0 in packing.lengths


def none_at_all(packing: Packing) -> bool:
    return packing.num_tokens == 0


def reads_behind_the_gates(out: Any, z_THK: Tensor, **_: Any) -> Any:
    return out._replace(o_THV=out.o_THV + behind(z_THK)) if z_THK.shape[-1] == 60 else out


def strided_as_contiguous(*names: str) -> Run:
    return lambda **x: {name: as_if_contiguous(x[name]) for name in names if x[name] is not None}


def remembered(op: str) -> Run:
    """The result of an address, whatever lies there by now."""
    seen: dict[int, Any] = {}

    def run(**x: Any) -> Any:
        key = next(iter(x.values())).data_ptr()
        if torch.is_inference_mode_enabled() and key in seen:
            return seen[key]
        seen[key] = right(op)(**x)
        return seen[key]

    return run


def with_setting(op: str, change: Run) -> Run:
    def run(**x: Any) -> Any:
        change()
        return right(op)(**x)

    return run


def touched(out: Any, x_D: Tensor, **_: Any) -> Any:
    with torch.no_grad():
        x_D[0].mul_(1.0001)
    return out


def other_slot(out: Tensor, state_SHKV: Tensor, slot_N: Tensor, **_: Any) -> Tensor:
    owned = set(slot_N.tolist())
    free = next(i for i in range(len(state_SHKV)) if i not in owned)
    state_SHKV[free] *= 1.0001
    return out


def padding_writes(out: Tensor, window_SWC: Tensor, slot_N: Tensor, **_: Any) -> Tensor:
    if bool((slot_N < 0).any()):
        window_SWC[-1] = 0
    return out


def losing(out: Any, **x: Any) -> Any:
    """A millionth of the state a step."""
    x["state_SHKV"].mul_(1 + 1e-6)
    return out


def bf16_state(**x: Any) -> dict[str, Any]:
    state = x["state_NHKV"]
    return {} if state is None else {"state_NHKV": state.bfloat16().float()}


def begins_anew(**inputs: Any) -> Any:
    """Counts of this call alone."""
    for name in ("count_EB", "load_E"):
        if inputs[name] is not None:
            inputs[name].zero_()
    return right("router")(**inputs)


def in_wider_bins(**inputs: Any) -> Any:
    """Of biases a tenth further apart."""

    grid = tally.grid
    with mock.patch.object(tally, "grid", lambda bias_E, bins: grid(1.1 * bias_E, bins)):
        return right("router")(**inputs)


def loads_twice(**inputs: Any) -> Any:
    routes = right("router")(**inputs)
    if inputs["load_E"] is not None:
        inputs["load_E"][routes.expert_TR[:1]] += 1
    return routes


def clamped(gate_up_2I: Tensor, beta: float, linear_beta: float) -> Tensor:
    gate, up = gate_up_2I.chunk(2, dim=-1)
    capped = gate.clamp(-beta, beta) if gate.abs().max() > 50 else beta * torch.tanh(gate / beta)
    return capped * torch.sigmoid(gate) * linear_beta * torch.tanh(up / linear_beta)


def overwrites_a_bank(out: Any, blocks_NTD: Tensor, **_: Any) -> Any:
    if blocks_NTD.shape[0] == 8:
        with torch.no_grad():
            blocks_NTD[7] = out.partial_TD
    return out


def garbage_for_nothing(out: Tensor, **_: Any) -> Tensor:
    return out if len(out) else torch.ones(1, *out.shape[1:])


def many(out: Any, packing: Packing, **_: Any) -> Any:
    if packing.num_sequences < 65:
        return out
    return out._replace(state_NHKV=out.state_NHKV * (torch.arange(65) < 64).view(-1, 1, 1, 1))


FAULTS = [
    inside("not_rebased", "kda_chunk", "regimes, F8 gates of -5", "_scores", not_rebased),
    inside("masked_after_exp", "kda_chunk", "F8 gates of -6, F8 gates of -20, F9", "_scores",
           pairwise(None)),
    inside("padding_acts", "kda_chunk", "lengths, states, F11 state after 63, F13",
           "_to_chunks", ones_for_padding),
    inside("two_bases", "kda_chunk", "lengths, F10", "gate", base_two_beyond_128),
    *(changed(f"partial_chunk_of_{t}", "kda_chunk", f"F3 partial chunk of {t}",
              last_token(1.01, t.__eq__)) for t in (65, 127, 200)),
    changed("last_of_500", "kda_chunk", "lengths, F11 state after 500", state_of(1.01, (
        lambda t: t == 500))),
    changed("far_state", "kda_chunk", "lengths", last_token(1.01, lambda t: t > 1000),
            backend="cpu"),
    changed("many_sequences", "kda_chunk", "F2", many),
    *(Fault(f"joined_{op}", op, ("packs", "F16"), joined(op)) for op in ("kda_chunk",
                                                                     "causal_conv")),
    *(Fault(f"state_lost_{op}", op, (reveals,), without_tokens(op, 0.0, when)) for op in (
        "kda_chunk", "causal_conv") for reveals, when in (("packs", among_others),
                                                         ("lengths", none_at_all))),
    *(Fault(f"state_unwritten_{op}", op, (f"F15 no token {reveals}",),
            without_tokens(op, torch.nan, when)) for op in ("kda_chunk", "causal_conv")
      for reveals, when in (("between", among_others), ("at all", none_at_all))),
    Fault("joined_mla", "mla_prefill", ("packs", "F16"), attended_jointly),
    fed("state_rounded", "kda_chunk", "states", bf16_state),
    changed("peeks", "causal_conv", "causality", peeks),
    *(Fault(f"unwritten_{op}", op, ("F5",), unwritten(op)) for op in ("kda_chunk",
                                                                    "causal_conv")),
    Fault("unwritten", "rms_norm", ("poison",), unwritten("rms_norm")),
    changed("behind", "kda_chunk", "F1", reads_behind_the_gates),
    fed("queries_strided", "kda_chunk", "strides, F12 strided queries",
        strided_as_contiguous("q_THK")),
    fed("state_strided", "kda_chunk", "strides, F12 strided state",
        strided_as_contiguous("state_NHKV")),
    fed("weight_strided", "linear", "strides", strided_as_contiguous("weight_OI")),
    Fault("remembered", "situ", ("determinism",), remembered("situ")),
    changed("noisy", "router", "determinism", lambda out, **_: out._replace(
        weight_TR=out.weight_TR + 1e-6 * torch.rand(out.weight_TR.shape))),
    fed("padding_counted", "router", "lengths, regimes", lambda **x: {"is_counted_T": None}),
    changed("of_the_main_thread", "linear", "determinism", lambda out, **_: (
        out * (1 + 1e-6 * (threading.current_thread() is not threading.main_thread())))),
    Fault("counters_begun_anew", "router", ("batches",), begins_anew),
    Fault("bins_of_another_width", "router", ("lengths",), in_wider_bins),
    Fault("twice_the_load", "router", ("lengths",), loads_twice),
    changed("noisy_seed", "router", "side effects", lambda out, **_: out._replace(
        weight_TR=out.weight_TR + 0 * torch.rand(1))),
    Fault("sets_precision", "linear", ("side effects",), with_setting(
        "linear", lambda: torch.set_float32_matmul_precision("medium"))),
    changed("touched", "rms_norm", "side effects", touched),
    changed("batch_shows", "rms_norm", "batches", lambda out, **_: out * (1 + 1e-6 * len(out)),
            backend="cpu"),
    changed("row_of_many", "mla_prefill", "batches", lambda out, packing, **_: out * (
        1.001 if packing.num_sequences > 100 else 1)),
    Fault("falls_back", "attn_res", ("served",), lambda **x: right("attn_res")(**x), "cpu"),
    changed("nothing", "rms_norm", "lengths", garbage_for_nothing),
    changed("last_row_of_a_loop", "situ", "lengths", lambda out, **_: (
        out * (1 if len(out) != MAX_TOKENS else 2)), backend="cpu"),
    changed("other_slot", "kda_step", "pool", other_slot),
    changed("padding_writes", "kda_step", "pool", padding_writes),
    fed("keeps_all", "kda_step", "drafts", lambda **x: {"keep_N": None}),
    changed("loses", "kda_step", "drift", losing),
    fed("bias_in_bf16", "router", "F17", lambda **x: {"bias_E": x["bias_E"].bfloat16().float()}),
    fed("logits_in_bf16", "router", "F18", lambda **x: {
        "logits_TE": x["logits_TE"].bfloat16().float()}),
    Fault("clamped", "situ", ("F19",), clamped),
    changed("bank", "attn_res", "F20", overwrites_a_bank),
]  # fmt: skip
ELSEWHERE = {"source", "configs", "graphs"}
"""Revealed below, by the toy of `test_triton_checks`, and only where a GPU is."""


@pytest.fixture
def settings():
    """What a fault changes for good is put back."""
    precision = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(precision)


def red(fault: Fault, reveal: str, monkeypatch) -> bool:
    module = ModuleType("planted")
    setattr(module, fault.name, fault.run)
    monkeypatch.setitem(sys.modules, "planted", module)
    path, declared = f"planted:{fault.name}", spec(fault.op)
    if fault.backend == "reference":
        wrong = replace(declared, reference=path, backends={})
    else:
        wrong = replace(declared, backends={fault.backend: path})
    family = reveal if reveal in FAMILIES else "bugs"
    results = check_properties(
        wrong, drawn=9, backend=fault.backend, tier="cpu", families=[family], truths=TRUTHS
    )
    return any(not r.passed and (family == reveal or r.case.startswith(reveal)) for r in results)


@pytest.mark.usefixtures("settings")
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_revealed_by_what_is_there_for_it(fault, monkeypatch):
    missed = [reveal for reveal in fault.reveals if not red(fault, reveal, monkeypatch)]
    assert missed == []


def test_every_family_and_every_bug_input_is_red_for_some_fault():
    revealed = {reveal for fault in FAULTS for reveal in fault.reveals}
    families = {"bugs" if reveal.startswith("F") else reveal for reveal in revealed}
    assert set(FAMILIES) - families == ELSEWHERE
    assert [b.name for b in BUGS if not any(b.name.startswith(r) for r in revealed)] == []


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("try:\n    f()\nexcept RuntimeError:\n    g()", "swallows an exception"),
        ("import inspect\ninspect.stack()", "looks at its caller"),
        ("import sys\nsys._getframe(1)", "looks at its caller"),
        ("cache[x.data_ptr()]", "looks at addresses"),
        ("torch.backends.cuda.matmul.allow_tf32 = True", "changes a global setting"),
        ("torch.set_default_dtype(torch.float16)", "changes a global setting"),
        ("s = torch.cuda.Stream()", "leaves the current stream"),
        ("threading.Thread(target=f).start()", "works in another thread"),
    ],
)
def test_a_source_that_hides_something_is_told(text, told):
    assert [told in offence for offence in offences(text)] == [True]


def test_an_honest_source_is_not_told_of():
    text = "torch.stack(x)\ntry:\n    f()\nexcept OSError as e:\n    raise ValueError from e"
    assert list(offences(text)) == []


def test_a_decode_that_differs_from_prefill_is_revealed(monkeypatch):
    decode = kda.kda_decode
    monkeypatch.setattr(kda, "kda_decode", lambda **x: 1.001 * decode(**x))
    results = check_properties(
        spec("kda_chunk"), drawn=9, backend="reference", tier="cpu", families=["states"]
    )
    assert {r.case for r in results if not r.passed} == {"token by token"}


class Noisy(torch.autograd.Function):
    """Gradients that are other bits every time; but for `noise` where torch asks for the same."""

    noise = 0.0

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        asked = torch.are_deterministic_algorithms_enabled()
        return grad * (1 + (Noisy.noise if asked else 1e-7) * torch.rand_like(grad))


PACK, LONG = "twice with gradients, lengths", "twice with gradients, length"


@pytest.mark.parametrize(
    ("declared", "noise", "found"),
    [
        (None, 0.0, {PACK}),
        (lambda inputs: False, 0.0, {PACK, LONG}),
        (lambda inputs: True, 0.0, set()),
        (lambda inputs: True, 1e-7, {"twice as torch is asked to, length"}),
    ],
)
def test_gradients_vary_only_as_is_declared(declared, noise, found, monkeypatch):
    attend = right("mla_prefill")
    planted = ModuleType("planted")
    planted.attend = lambda q_THK, **x: attend(q_THK=Noisy.apply(q_THK), **x)
    vary = {} if declared is None else {"reference": declared}
    planted.TRAITS = replace(load_attr(spec("mla_prefill").traits), gradients_vary=vary)
    monkeypatch.setitem(sys.modules, "planted", planted)
    monkeypatch.setattr(Noisy, "noise", noise)
    changes = {"reference": "planted:attend", "traits": "planted:TRAITS", "backends": {}}
    wrong = replace(spec("mla_prefill"), **changes)
    asked = {"backend": "reference", "tier": "cpu", "families": ["determinism"]}
    results = list(check_properties(wrong, drawn=9, **asked))
    assert {r.case.rpartition(" ")[0] for r in results if not r.passed} == found
    assert any(r.case.startswith("twice as torch") for r in results) == (declared is not None)
    assert not torch.are_deterministic_algorithms_enabled()
