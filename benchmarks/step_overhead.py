"""What a decode step costs the host, part by part and by batch size.

    python benchmarks/step_overhead.py [MODEL ...] [--batches 1,8,32,64] [--context N] [--steps N]
                                       [--device cuda] [--plain | --in-turn] [--drawn] [--out FILE]

MODEL is `none` (no model at all: the engine's own work), a preset with random weights (`tiny-k3`),
or `k3-stack`: four layers of K3 at full width, three of KDA and one of MLA, with random weights and
experts in MXFP4, for a GPU. All sequences are greedy, or with `--drawn` of temperature 1, and have
CONTEXT tokens in their caches, which are random numbers. `--plain`: without graphs; `--in-turn`:
with graphs, but no step is launched before the one before has been read. On a GPU, `device` is the
time that the host waits, and the kernels' own time comes from a profiler in steps of their own.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from report import provenance
from torch import Tensor, nn

from perilune.core.types import EngineInfo, SamplingParams, TokenRequest
from perilune.engine.admission import admit
from perilune.engine.batch import Plan
from perilune.engine.core import EngineCore
from perilune.engine.decode_buffers import HostBuffer
from perilune.engine.flight import Flight
from perilune.engine.lane import GpuLane, HostLane, Work
from perilune.engine.pooled_memory import Room, Started
from perilune.engine.wire import Step as StepFrame
from perilune.engine.wire import frame
from perilune.model.contexts.kernel_times import kernel_times
from perilune.model.contexts.plan import HYBRID, first_layer, stack_config
from perilune.model.init import random_weights
from perilune.model.layer_bench import random_layer
from perilune.model.make_step import Limits, make_step
from perilune.model.model import Transformer
from perilune.model.pools import Pools
from perilune.model.presets import preset
from perilune.model.step import PAGE, DecodeRange, Decoding, Prefilling, Step

VOCAB = 512
WARM_UP = 8
PROFILED = 10
PARTS = ("schedule", "integers", "launch", "sample", "commit", "frames")


class NoPools:
    """Nothing is kept; steps are made as for real pools."""

    slot_nbytes = page_nbytes = 1

    def __init__(self, slots: int, pages: int) -> None:
        self._limits = Limits(torch.device("cpu"), slots, pages, 3)

    def step(
        self, decoding: Sequence[Decoding], prefilling: Sequence[Prefilling] = (), **draft: Any
    ) -> Step:
        return make_step(self._limits, decoding, prefilling, **draft)

    def decode_step(
        self, slot_N: Tensor, table_NJ: Tensor, length_N: Tensor, row_N: Tensor
    ) -> Step:
        return Step(DecodeRange(slot_N, table_NJ, length_N, None, 1), (), row_N, None)

    def copy_slots(self, pairs: Sequence[tuple[int, int]]) -> None: ...

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None: ...


class NoModel:
    """The same logits for everybody."""

    page_len = PAGE

    def __init__(self) -> None:
        self._logits_NV = torch.zeros(1024, VOCAB)

    def new_pools(self, *, slots: int, pages: int) -> NoPools:
        return NoPools(slots, pages)

    def step(self, token_ids_T: Tensor, pools: NoPools, step: Step) -> Tensor:
        return self._logits_NV[: len(token_ids_T)]


@torch.no_grad()
def k3_stack(device: torch.device) -> Transformer:
    config = preset("kimi-k3")
    assert config.moe is not None
    generator = torch.Generator(device).manual_seed(1)
    first = first_layer(config)
    own = replace(stack_config(config, HYBRID), moe=replace(config.moe, first_k_dense=0))
    with torch.device("meta"):
        model = Transformer(own)
    model.model.layers = nn.ModuleList()
    model = model.to(torch.bfloat16).to_empty(device=device)
    for name, p in model.named_parameters():
        if "norm" in name:
            p.fill_(1.0)
        else:
            p.normal_(0.0, p.shape[-1] ** -0.5, generator=generator)
    layers = [
        random_layer(config, first + i, device, torch.bfloat16, generator, packed=True)
        for i in range(own.num_layers)
    ]
    for layer in layers:
        layer.block_sparse_moe.gate.e_score_correction_bias.zero_()
    layers[0].starts_block = True
    model.model.layers = nn.ModuleList(layers)
    return model.freeze()


def model_of(name: str, device: torch.device) -> Any:
    if name == "none":
        return NoModel()
    if name == "k3-stack":
        return k3_stack(device)
    model = random_weights(Transformer(preset(name)), torch.Generator().manual_seed(1))
    return model.to(device).freeze()


class Watch:
    """Adds up seconds by part; what a part calls of another one counts for that one alone."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._inside = 0.0

    def timed(self, part: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            outside, self._inside = self._inside, 0.0
            start = time.perf_counter()
            try:
                return run(*args, **kwargs)
            finally:
                took = time.perf_counter() - start
                self.seconds[part] += took - self._inside
                self._inside = outside + took

        return call


class TimedHostLane(HostLane):
    """On a CPU the model runs where a GPU's would only be enqueued."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def run(self, work: Work) -> None:
        self._watch.timed("device", work)()


class Mode(NamedTuple):
    graphs: bool
    run_ahead: bool
    is_drawn: bool


class Bench:
    """An engine whose sequences decode, and what its steps cost."""

    def __init__(
        self,
        model: Any,
        device: torch.device,
        batch: int,
        context: int,
        mode: Mode,
        room_for: int = 1024,
    ) -> None:
        """`room_for`: tokens of each sequence behind its context."""
        self.watch = Watch()
        vocab = VOCAB if isinstance(model, NoModel) else model.config.vocab_size
        num_pages = -(-(context + room_for) // PAGE)
        lane = GpuLane(device) if device.type == "cuda" else TimedHostLane(self.watch)
        self.device, self.mode = device, mode
        self.core = EngineCore(
            model,
            room=Room(1 + batch * num_pages, batch),
            device=device,
            max_running=batch,
            max_context=context + room_for,
            graphs=mode.graphs,
            run_ahead=mode.run_ahead,
            lane=lane,
        )
        pools = self.core.scheduler.memory.pools
        if isinstance(pools, Pools):
            generator = torch.Generator(device).manual_seed(2)
            for tensor in (pools.state_LSHKV, pools.window_LSWC, pools.rows_LPBC):
                tensor.normal_(generator=generator)
        self.core.warm_up()
        info = EngineInfo(
            model_id="", vocab_size=vocab, max_context=context + room_for, eos_ids=frozenset()
        )
        self.sequences = [
            self._decoding(i, [(7 * i + t) % vocab for t in range(context)], room_for, info)
            for i in range(batch)
        ]
        self.calls = {sequence: i for i, sequence in enumerate(self.sequences)}

    def _decoding(self, i: int, ids: list[int], room_for: int, info: EngineInfo) -> Any:
        """As if it had read all of its prompt."""
        request = TokenRequest(
            request_id=str(i),
            prompt_ids=tuple(ids[:-1]),
            max_tokens=room_for,
            sampling=SamplingParams(temperature=float(self.mode.is_drawn), seed=i),
        )
        sequence = admit(request, info)
        self.core.add(sequence)
        memory = self.core.scheduler.memory
        assert memory.start(sequence, 0) is Started.YES
        assert memory.grow(sequence, len(ids))
        sequence.num_computed = len(ids) - 1
        sequence.append(ids[-1])
        return sequence

    def steps(self, count: int) -> None:
        for _ in range(count):
            self._tell(self.core.step())

    def _tell(self, emitted: Sequence[Any]) -> bytes:
        events = [(self.calls[item.sequence], item.event) for item in emitted]
        return frame(StepFrame(events, self.core.stats()))

    @contextmanager
    def _watched(self) -> Iterator[None]:
        core: Any = self.core
        scheduler, runner = core.scheduler, core._runner
        timed, fill, read = self.watch.timed, HostBuffer.fill, Flight.read
        launch = timed("launch", runner.launch)

        def launch_and_time(plan: Plan) -> Flight:
            flight = launch(plan)
            return flight._replace(wait=timed("device", flight.wait))

        runner.launch = launch_and_time
        scheduler.schedule = timed("schedule", scheduler.schedule)
        scheduler.ahead = timed("schedule", scheduler.ahead)
        core._commit = timed("commit", core._commit)
        self._tell = timed("frames", self._tell)
        HostBuffer.fill = timed("integers", fill)
        Flight.read = timed("sample", read)
        try:
            yield
        finally:
            del runner.launch, scheduler.schedule, scheduler.ahead, core._commit, self._tell
            HostBuffer.fill, Flight.read = fill, read

    def measure(self, count: int) -> dict[str, float]:
        """Microseconds a step."""
        self.steps(WARM_UP)
        self._settle()
        start = time.perf_counter()
        self.steps(count)
        self._settle()
        plain = (time.perf_counter() - start) / count
        with self._watched():
            self.watch.seconds.clear()
            start = time.perf_counter()
            self.steps(count)
            step = (time.perf_counter() - start) / count
        found = {part: 1e6 * self.watch.seconds[part] / count for part in (*PARTS, "device")}
        found |= {"host": 1e6 * step - found["device"], "step": 1e6 * plain}
        if self.device.type == "cuda":
            times = kernel_times(lambda: self.steps(PROFILED), self.device)
            assert times is not None
            found["kernels"] = 1e6 * times.busy_s / PROFILED
            found["largest"] = {name: 1e6 * s / PROFILED for name, s in times.largest.items()}
        return found

    def _settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def table(rows: Sequence[dict[str, Any]]) -> str:
    names = ["model", "batch", *PARTS, "host", "device", "step"]
    names += ["kernels"] if "kernels" in rows[0] else []
    lines = ["| " + " | ".join([*names, "host / step"]) + " |"]
    lines.append("| " + " | ".join(["---"] + ["---:"] * len(names)) + " |")
    for row in rows:
        cells = [row[name] if name == "model" else f"{row[name]:.0f}" for name in names]
        lines.append("| " + " | ".join([*cells, f"{row['host'] / row['step']:.0%}"]) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=["none", "tiny-k3"])
    parser.add_argument("--batches", default="1,8,32,64")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--device", default="cpu")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--plain", action="store_true", help="without graphs")
    how.add_argument("--in-turn", action="store_true", help="no step before the one before is read")
    parser.add_argument("--drawn", action="store_true", help="at temperature 1, not greedy")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = torch.device(args.device)
    mode = Mode(not args.plain, not args.plain and not args.in_turn, args.drawn)
    rows = []
    for name in args.models:
        model = model_of(name, device)
        for batch in map(int, args.batches.split(",")):
            room_for = 2 * args.steps + WARM_UP + 8 * PROFILED + 8
            bench = Bench(model, device, batch, args.context, mode, room_for)
            rows.append({"model": name, "batch": batch, **bench.measure(args.steps)})
            del bench
    print(f"microseconds a step; context {args.context}, {mode}, {device}, {platform.machine()}")
    print(table(rows))
    result = {**provenance("torch"), "context": args.context, **mode._asdict(), "us_a_step": rows}
    if device.type == "cuda":
        result["hardware"] = torch.cuda.get_device_name(device)
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
