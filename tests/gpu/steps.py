"""Steps over pools on a GPU: the CPU's results, no word from the device, sequences that move.

Legend: N sequences, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from perilune.model.model import Transformer
from perilune.model.step import PAGE, Cut, Decoding, Prefilling, Step

Add = Callable[..., None]
"""Of a table: name, value, whether it is as it should be."""


class Together:
    """N sequences on pools of their own, NaN wherever none has written; one more slot and page."""

    def __init__(self, model: Transformer, lengths: Sequence[int], room: int) -> None:
        each = [-(-(length + room) // PAGE) for length in lengths]
        self.model, self.lengths = model, [0] * len(lengths)
        self.pools = model.new_pools(slots=2 * len(lengths) + 2, pages=sum(each) + 2)
        for x in (self.pools.state_LSHKV, self.pools.window_LSWC, self.pools.rows_LPBC):
            x.fill_(torch.nan)
        order = torch.randperm(sum(each), generator=torch.Generator().manual_seed(1)) + 1
        self.pages = [part.numpy() for part in order.int().split(each)]
        self.slots = list(range(len(lengths)))

    def chunk(self, n: int, count: int, cuts: Sequence[Cut] = (), wanted: int = 1) -> Prefilling:
        fed = Prefilling(self.slots[n], self.pages[n], self.lengths[n], count, cuts, wanted)
        self.lengths[n] += count
        return fed

    def next(self, n: int) -> Decoding:
        self.lengths[n] += 1
        return Decoding(self.slots[n], self.pages[n], self.lengths[n])

    def run(self, ids: Sequence[int] | Tensor, step: Step) -> Tensor:
        device = self.pools.limits.device
        ids_T = torch.as_tensor(ids)
        if ids_T.device != device:
            ids_T = ids_T.pin_memory().to(device, non_blocking=True)
        return self.model.step(ids_T, self.pools, step)

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Logits [N, V] of the last tokens."""
        chunks = [self.chunk(n, len(prompt)) for n, prompt in enumerate(prompts)]
        return self.run([i for prompt in prompts for i in prompt], self.pools.step([], chunks))

    def decode(self, ids_N: Tensor, **fixed: int) -> Tensor:
        """Logits [N, V]."""
        return self.run(ids_N, self.pools.step([self.next(n) for n in range(len(ids_N))], **fixed))

    def move(self, n: int, slot: int) -> None:
        """To another slot; NaN stays behind."""
        self.pools.copy_slots([(self.slots[n], slot)])
        self.pools.state_LSHKV[:, self.slots[n]] = torch.nan
        self.pools.window_LSWC[:, self.slots[n]] = torch.nan
        self.slots[n] = slot


class Mixed(NamedTuple):
    logits: list[Tensor]
    """Of every step."""
    together: Together
    cuts: list[Cut]


@contextmanager
def no_word_from_the_device() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@torch.inference_mode()
def mixed_run(
    model: Transformer, ids: Sequence[int], lengths: Sequence[int], silent: bool
) -> Mixed:
    """Prompts in chunks beside sequences that decode, with states cut out; logits of every step."""
    together = Together(model, [sum(lengths)] * 4, 8)
    pools = together.pools
    cuts = [Cut(2, 4), Cut(lengths[0] // 2, 5), Cut(1, 6)]
    plans = [
        lambda t: ([], [t.chunk(0, lengths[0], cuts[:2], 3), t.chunk(1, 1)]),
        lambda t: ([t.next(1)], [t.chunk(0, lengths[1], cuts[2:], 2), t.chunk(2, lengths[2])]),
        lambda t: ([t.next(0), t.next(1)], [t.chunk(3, 1), t.chunk(2, lengths[1])]),
        lambda t: ([t.next(n) for n in range(4)], []),
    ]
    logits, at = [], 0
    for plan in plans:
        decoding, chunks = plan(together)
        count = len(decoding) + sum(chunk.num_new for chunk in chunks)
        fed = ids[at : at + count]
        at += count
        with no_word_from_the_device() if silent else nullcontext():
            logits.append(together.run(fed, pools.step(decoding, chunks)))
    return Mixed(logits, together, cuts)


def drawn(count: int, seed: int) -> list[int]:
    return torch.randint(0, 1000, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


LENGTHS = (161, 70, 33)


def mixed_truth(model: Transformer) -> Mixed:
    """What `check_mixed` wants, from a model on the CPU in fp32."""
    return mixed_run(model, drawn(900, 7), LENGTHS, False)


def check_mixed(add: Add, name: str, model: Transformer, want: Mixed, limit: float) -> None:
    """Prompts in chunks beside sequences that decode; a run of other lengths may compile before."""
    # In fp32 routed experts ask the device for their sizes.
    silent = model.head_weight.is_cuda and model.head_weight.dtype == torch.bfloat16
    mixed_run(model, drawn(900, 7), (150, 90, 40), False)
    got = mixed_run(model, drawn(900, 7), LENGTHS, silent)
    worst = max(gap(a.cpu(), b) for a, b in zip(got.logits, want.logits, strict=True))
    add(f"{name}: logits of mixed steps", f"{worst:.1e}", worst <= limit)
    slots = [*got.together.slots, *(cut.slot for cut in got.cuts)]
    for kind in ("state_LSHKV", "window_LSWC"):
        mine, other = (getattr(x.together.pools, kind)[:, slots] for x in (got, want))
        worst = max(gap(a.cpu().float(), b) for a, b in zip(mine, other, strict=True))
        add(f"{name}: {kind} after them, cuts too", f"{worst:.1e}", worst <= limit)
    if silent:
        add(f"{name}: words from the device in a step", 0, True)


def gap(got: Tensor, want: Tensor) -> float:
    return float((got - want).abs().max() / want.abs().max())


@torch.inference_mode()
def check_graph(add: Add, name: str, model: Transformer) -> None:
    """A step that decodes: captured once, replayed while sequences move and come and go, the same
    bits as without a graph."""
    ids = drawn(200, 9)
    for rows in (1, 4):
        prompts = [ids[:63], ids[10:110], ids[20:25], ids[30:95]][:rows]
        fixed = {"padded_to": rows, "table_width": 8}
        eager, captured = (Together(model, [len(p) for p in prompts], 40) for _ in range(2))
        ids_N = eager.prefill(prompts).argmax(-1)
        assert torch.equal(ids_N, captured.prefill(prompts).argmax(-1))
        static, static_ids = captured.pools.step([], **fixed), torch.zeros_like(ids_N)
        graph, out = capture(lambda: model.step(static_ids, captured.pools, static))  # noqa: B023
        same = []
        for turn in range(6):
            static.load(captured.pools.step([captured.next(n) for n in range(rows)], **fixed))
            static_ids.copy_(ids_N)
            graph.replay()
            want_NV = eager.decode(ids_N, **fixed)
            same.append(torch.equal(out, want_NV))
            ids_N = want_NV.argmax(-1)
            captured.move(turn % rows, next(s for s in range(99) if s not in captured.slots))
        states = [t.pools.state_LSHKV[:, t.slots] for t in (eager, captured)]
        same.append(torch.equal(*states))
        add(f"{name}: graph of a step, {rows} sequences", f"{sum(same)} of {len(same)}", all(same))


def capture(run: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # a library's first call on a stream allocates
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    # Of this thread alone: NCCL has one that asks the device about events all the time.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = run()
    return graph, out
