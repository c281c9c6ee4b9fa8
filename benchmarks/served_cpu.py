"""What the whole server leaves of the bare model's tokens/s, by number of streams, on the CPU.

    python benchmarks/served_cpu.py [MODEL_DIR] [--streams 1,2,4,8] [--rounds R] [--out FILE]

The bare model is a loop of decode steps and argmax in a process of its own; the server is
`perilune serve` with engine and front in their processes, asked over HTTP for greedy streams, and
without speculation, which the bare model has not. Both stay alive and are measured in turns, the
bare model before and after every number of streams. A stream's rate counts from its first token, so
that prefill is in neither. Every process computes with one thread; on two cores, what the front and
the client need is taken from the engine's time only where the machine has nothing else.
"""

from __future__ import annotations

import argparse
import http.client
import json
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from report import keep, provenance, spread

PROMPT = [100, 200, 300, 400] * 8


class Stream(NamedTuple):
    tokens: int
    first_s: float
    last_s: float


class Bare:
    def __init__(self, model_dir: str) -> None:
        command = [sys.executable, __file__, model_dir, "--bare"]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._line()

    def tokens_per_s(self, num_tokens: int) -> float:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{num_tokens}\n")
        self.process.stdin.flush()
        return float(self._line())

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def serve_bare(model_dir: str) -> None:
    """Answers each line, a number of tokens, with the tokens/s of decoding them."""
    import torch

    from perilune.model.api import load_model
    from perilune.model.lone import LoneSequence

    torch.set_num_threads(1)
    loaded = load_model(model_dir)
    loaded.warm_up()
    print("ready", flush=True)
    with torch.inference_mode():
        for line in sys.stdin:
            sequence = LoneSequence(loaded.model)
            token = sequence.prefill(torch.tensor(PROMPT))[0].argmax()
            start, count = time.perf_counter(), int(line) - 1
            for _ in range(count):
                token = sequence.decode(token.reshape(1))[0].argmax()
            print(count / (time.perf_counter() - start), flush=True)


class Server:
    def __init__(self, model_dir: str) -> None:
        command = [sys.executable, "-m", "perilune.cli.main", "serve", model_dir]
        command += ["--port", "0", "--threads", "1", "--device", "cpu", "--no-speculation"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        found = re.search(r"serving (\S+) .*http://[^:]+:(\d+)", self.process.stdout.readline())
        if found is None:
            raise SystemExit("the server did not start")
        self.model, self.port = found[1], int(found[2])

    def tokens_per_s(self, streams: int, num_tokens: int) -> float:
        """Of all streams together, from the first token of the first to the last of the last."""
        with ThreadPoolExecutor(streams) as pool:
            done = list(pool.map(self._stream, [num_tokens] * streams))
        seconds = max(s.last_s for s in done) - min(s.first_s for s in done)
        return sum(s.tokens - 1 for s in done) / seconds

    def _stream(self, num_tokens: int) -> Stream:
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        body = {"model": self.model, "prompt": PROMPT, "max_tokens": num_tokens}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        body |= {"temperature": 0, "ignore_eos": True}
        headers = {"content-type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        if answer.status != 200:
            raise SystemExit(f"the server said {answer.status}: {answer.read().decode()}")
        pieces = [
            (time.perf_counter(), json.loads(line[6:]))
            for line in answer
            if line.startswith(b"data: {")
        ]
        connection.close()
        at = [at_s for at_s, piece in pieces if piece["choices"]]
        if pieces[-1][1]["usage"]["completion_tokens"] != num_tokens:
            raise SystemExit(f"not a stream of {num_tokens} tokens: {pieces[-1][1]}")
        return Stream(num_tokens, at[0], at[-1])

    def close(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", default="models/nano")
    parser.add_argument("--streams", default="1,2,4,8")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--bare", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.bare:
        serve_bare(args.model)
        return
    counts = [int(count) for count in args.streams.split(",")]
    bare, server = Bare(args.model), Server(args.model)
    bares: list[float] = []
    served: dict[int, list[float]] = {count: [] for count in counts}
    shares: dict[int, list[float]] = {count: [] for count in counts}
    try:
        server.tokens_per_s(1, args.tokens)
        before = bare.tokens_per_s(args.tokens)
        for _ in range(args.rounds):
            for count in counts:
                rate = server.tokens_per_s(count, args.tokens)
                after = bare.tokens_per_s(args.tokens)
                served[count].append(rate)
                shares[count].append(rate / ((before + after) / 2))
                bares.append(after)
                before = after
    finally:
        server.close()
        bare.close()
    result: dict[str, Any] = {
        **provenance("torch", "numba", "granian"),
        "rounds": args.rounds,
        "tokens": args.tokens,
        "bare_tokens_per_s": spread(bares),
        "served_tokens_per_s": {str(n): spread(values) for n, values in served.items()},
        "served_over_bare": {str(n): spread(values) for n, values in shares.items()},
    }
    keep(result, args.out)


if __name__ == "__main__":
    main()
