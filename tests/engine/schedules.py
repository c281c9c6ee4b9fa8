"""Random schedules until so many steps of the engine have run: `make test-schedules`.

The machines of `memory_machine`, driven by plain random numbers: hypothesis finds and shrinks,
and takes most of the time for that. Each has a number, from which it can be had again (`--first
NUMBER --steps 1`); kinds take turns. What all have been through is written as JSON.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections import Counter
from collections.abc import Iterable
from itertools import count
from pathlib import Path
from random import Random

from memory_machine import LateMachine, MachineOnGraphs, MachineThatRunsAhead, MemoryMachine

NUM_ACTIONS = 150
KINDS = {
    "plain": MemoryMachine,
    "graphs": MachineOnGraphs,
    "ahead": MachineThatRunsAhead,
    "late": LateMachine,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1_000_000, help="of the engine (%(default)s)")
    parser.add_argument("--first", type=int, default=0, metavar="NUMBER", help="(%(default)s)")
    parser.add_argument("--kind", choices=KINDS, help="by default all of them")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="at most")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    args = parser.parse_args()
    logging.disable(logging.WARNING)  # damaged files are said there
    kinds = {args.kind: KINDS[args.kind]} if args.kind else KINDS
    for kind in kinds.values():
        kind.counted = Counter()
    start_s = time.monotonic()
    for number in count(args.first):
        num_steps = sum(kind.counted["steps"] for kind in kinds.values())
        took_s = time.monotonic() - start_s
        if num_steps >= args.steps or took_s >= 60 * args.minutes:
            break
        if number % 500 == 0:
            print(f"machine {number}, {num_steps} steps so far", flush=True)
        try:
            run(number, [*kinds.values()][number % len(kinds)])
        except BaseException:
            print(f"machine {number} has failed", flush=True)
            raise
    found = {
        "first": args.first,
        "steps": num_steps,
        "seconds": round(took_s),
        "kinds": {name: dict(sorted(kind.counted.items())) for name, kind in kinds.items()},
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found))


def run(number: int, kind: type[MemoryMachine] = MemoryMachine) -> None:
    draw = Random(number)
    machine = kind()
    machine.open(
        pages=draw.choice([24, 14, 8]),
        slots=draw.choice([1, 3, 6, 9, 12]),
        budget=draw.choice([16, 7, 1]),
        interval=draw.choice([0, 3, 8]),
        is_caching=draw.random() < 0.85,
        host_bytes=draw.choice([0, 200, 1000]),
        disk_bytes=draw.choice([0, 2500]),
        guesses=draw.choice([None, draw.getrandbits(32)]),
    )
    try:
        for _ in range(NUM_ACTIONS):
            act(machine, draw)
            machine.scheduler_agrees()
            machine.states_are_those_of_their_tokens()
        machine.teardown()
    except BaseException:
        machine.thread.run()
        machine.core.scheduler.memory.close()  # files, of which nobody else would know
        machine.folder.cleanup()
        raise


def run_all(numbers: Iterable[int], kind: type[MemoryMachine] = MemoryMachine) -> None:
    for number in numbers:
        run(number, kind)


def act(machine: MemoryMachine, draw: Random) -> None:
    kind = draw.choices(["step", "add", "move", "evict", "damage", "end"], [40, 30, 8, 8, 2, 4])[0]
    match kind:
        case "step":
            machine.step(count=draw.randint(1, 12))
        case "add":
            machine.add(
                source=draw.randint(0, 3),
                kept=draw.choice([60, 60, 17, 7, 0]),
                new=[draw.randint(0, 15) for _ in range(draw.randint(0, 9))],
                max_tokens=draw.choice([2, 5, 30]),
                choices=draw.randint(1, 3),
                request_id=draw.choice("abc"),
                priority=draw.choice([0, 0, 0, 1, -1]),
                pin_s=draw.choice([None, None, None, 10_000.0]),
            )
        case "move":
            machine.move(num=draw.randint(1, 4))
        case "evict":
            machine.evict(num_pages=draw.randint(0, 5), num_slots=draw.randint(0, 3))
        case "damage":
            machine.damage(at=draw.randint(0, 200))
        case "end":
            end = draw.choice(
                [machine.abort, machine.abort_while_the_model_runs, machine.break_one]
            )
            end(which=draw.randint(0, 5))


if __name__ == "__main__":
    main()
