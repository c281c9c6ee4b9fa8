"""Sequences on pools as an engine holds them, and what each should have left there.

Whatever no sequence owns is NaN, from the start and again when it is freed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from perilune.kernels.common.packing import Packing
from perilune.kernels.kda.oracle import kda_recurrent
from perilune.kernels.registry import recorded
from perilune.model.mla import MLA
from perilune.model.model import Transformer
from perilune.model.pools import Pools, StatePool
from perilune.model.step import PAGE, Cut, Decoding, Prefilling

CLOSE = 1e-4
"""Of the largest value: tiny AttnRes models amplify rounding to 9e-5 between prefill and decode."""
CPU = torch.device("cpu")


class Left(NamedTuple):
    """Of one layer, after every number of tokens from 0 on."""

    state_SHKV: Tensor | None
    input_SC: Tensor | None
    """Of the convolutions, with a window of zeros in front."""
    latent_SC: Tensor | None


class Truth:
    """One forward pass without any memory, and the recurrence token by token in fp64."""

    @torch.inference_mode()
    def __init__(self, model: Transformer, ids_T: Tensor) -> None:
        self.window = model.config.kda.conv_width - 1
        normed: list[Tensor] = []
        mlas = [each.self_attn for each in model.model.layers if isinstance(each.self_attn, MLA)]
        hooks = [
            mla.kv_a_layernorm.register_forward_hook(lambda *call: normed.append(call[2]))
            for mla in mlas
        ]
        with recorded() as calls:
            self.logits_TV = model(ids_T, Packing.of([len(ids_T)]))
        for hook in hooks:
            hook.remove()
        by_op = {op: iter([c for c in calls if c.op == op]) for op in {c.op for c in calls}}
        self.layers: list[Left] = []
        for each in model.model.layers:
            if isinstance(each.self_attn, MLA):
                shared_TR = next(by_op["mla_prefill"]).args[2]
                self.layers.append(Left(None, None, torch.cat([normed.pop(0), shared_TR], -1)))
                continue
            x_TC = next(by_op["causal_conv"]).args[0]
            zeros = x_TC.new_zeros(self.window, x_TC.shape[1])
            args = [
                x.double() if isinstance(x, Tensor) else x for x in next(by_op["kda_chunk"]).args
            ]
            out = kda_recurrent(*args[:9], None, (tuple(range(1, len(ids_T) + 1)),))
            assert out.cut_EHKV is not None
            state = torch.cat([torch.zeros_like(out.cut_EHKV[:1]), out.cut_EHKV]).float()
            self.layers.append(Left(state, torch.cat([zeros, x_TC]), None))


def close(got: Tensor, want: Tensor, bound: float = CLOSE) -> None:
    assert got.shape == want.shape
    gap = float((got.float() - want.float()).abs().max())
    assert gap <= bound * float(want.float().abs().max()), gap


@dataclass(eq=False)
class Held:
    ids_T: Tensor
    slot: int
    pages: list[int] = field(default_factory=list)
    done: int = 0
    logits: dict[int, Tensor] = field(default_factory=dict)
    """By the number of tokens seen."""


class Batch:
    def __init__(
        self,
        model: Transformer,
        *,
        slots: int = 10,
        pages: int = 24,
        state_dtype: torch.dtype | None = None,
    ) -> None:
        self.model = model
        self.pools = Pools.of(
            model.share,
            slots=slots,
            pages=pages,
            device=CPU,
            dtype=torch.float32,
            state_dtype=state_dtype,
        )
        for pool in self.tensors:
            pool.fill_(torch.nan)
        # In no order: neither slots nor pages follow one another.
        order = torch.Generator().manual_seed(1)
        self.free_slots = torch.randperm(slots, generator=order).tolist()
        self.free_pages = (torch.randperm(pages - 1, generator=order) + 1).tolist()

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.pools.state_LSHKV, self.pools.window_LSWC, self.pools.rows_LPBC

    def open(self, ids_T: Tensor) -> Held:
        return Held(ids_T, self.free_slots.pop())

    def reserve(self, sequence: Held, tokens: int) -> None:
        while len(sequence.pages) * PAGE < tokens:
            sequence.pages.append(self.free_pages.pop())

    def decoding(self, sequence: Held, num_each: int = 1) -> Decoding:
        self.reserve(sequence, sequence.done + num_each)
        return Decoding(sequence.slot, sequence.pages, sequence.done + num_each)

    def chunk(self, sequence: Held, num_new: int, cuts: Sequence[Cut] = ()) -> Prefilling:
        self.reserve(sequence, sequence.done + num_new)
        return Prefilling(sequence.slot, sequence.pages, sequence.done, num_new, cuts, num_new)

    @torch.inference_mode()
    def run(
        self,
        decode: Sequence[Held],
        chunks: Sequence[tuple[Held, int, Sequence[Cut]]] = (),
        **options: int,
    ) -> None:
        """One step, fed with the sequences' own next tokens; keeps all logits."""
        step = self.pools.step(
            [self.decoding(s) for s in decode], [self.chunk(*each) for each in chunks], **options
        )
        fed = [(s, 1) for s in decode] + [(s, n) for s, n, _ in chunks]
        padding = [torch.zeros(step.num_decoded - len(decode), dtype=torch.long)]
        ids = [s.ids_T[s.done : s.done + n] for s, n in fed]
        ids_T = torch.cat(ids[: len(decode)] + padding + ids[len(decode) :])
        logits_RV = self.model.step(ids_T, self.pools, step)
        rows = [logits_RV[: len(decode)], logits_RV[step.num_decoded :]]
        parts = torch.cat(rows).split([n for _, n in fed])
        for (s, _), logits_NV in zip(fed, parts, strict=True):
            for row_V in logits_NV:
                s.done += 1
                s.logits[s.done] = row_V

    def fork(self, slot: int, parent: Held, tokens: int, ids_T: Tensor) -> Held:
        """A sequence that goes on from a checkpoint: it shares full pages and copies the last."""
        child = self.open(ids_T)
        self.pools.copy_slots([(slot, child.slot)])
        full = tokens // PAGE
        child.pages = parent.pages[:full]
        if tokens % PAGE:
            self.reserve(child, tokens)
            self.pools.copy_pages([(parent.pages[full], child.pages[full])])
            self.pools.rows_LPBC[:, child.pages[full], tokens % PAGE :] = torch.nan
        child.done = tokens
        return child

    def free(self, sequence: Held, keep_pages: Sequence[int] = ()) -> None:
        self.free_slot(sequence.slot)
        for page in set(sequence.pages) - set(keep_pages):
            self.pools.rows_LPBC[:, page] = torch.nan
            self.free_pages.append(page)

    def free_slot(self, slot: int) -> None:
        self.pools.state_LSHKV[:, slot] = torch.nan
        self.pools.window_LSWC[:, slot] = torch.nan
        self.free_slots.append(slot)

    def check(self, sequence: Held, truth: Truth, bound: float = CLOSE) -> None:
        """Logits, states, windows and latent rows are the truth's."""
        if not sequence.done:
            return
        for seen, row_V in sequence.logits.items():
            close(row_V, truth.logits_TV[seen - 1], bound)
        self.check_slot(sequence.slot, sequence.done, truth, bound)
        for pool, left in zip(self.pools.layers, truth.layers, strict=True):
            if left.latent_SC is not None:
                rows_SC = pool.rows_PBC[sequence.pages].flatten(0, 1)
                close(rows_SC[: sequence.done], left.latent_SC[: sequence.done], bound)

    def check_slot(self, slot: int, tokens: int, truth: Truth, bound: float = CLOSE) -> None:
        for pool, left in zip(self.pools.layers, truth.layers, strict=True):
            if isinstance(pool, StatePool):
                close(pool.state_SHKV[slot], left.state_SHKV[tokens], bound)
                close(pool.window_SWC[slot], left.input_SC[tokens : tokens + truth.window], bound)

    def check_untouched(self, sequences: Sequence[Held]) -> None:
        """Nothing but what the sequences own was written, and page 0 but for padding."""
        for pool in self.tensors[:2]:
            assert torch.isnan(pool[:, self.free_slots]).all()
        rows_LPBC = self.pools.rows_LPBC
        assert torch.isnan(rows_LPBC[:, self.free_pages]).all()
        assert torch.isnan(rows_LPBC[:, 0, 1:]).all()
        for s in sequences:
            if s.pages:
                assert torch.isnan(rows_LPBC[:, s.pages].flatten(1, 2)[:, s.done :]).all()
