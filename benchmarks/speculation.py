"""Decoding with drafts looked up in the text, beside decoding without: one stream.

    python benchmarks/speculation.py [MODEL_DIR] [--device cpu|cuda] [--dtype float32|bfloat16]
                                     [--threads N] [--out FILE]

Both engines share the model's weights and run in turns in this process; on a GPU both run graphs,
and the one without drafts launches steps ahead. Texts that repeat
themselves are what lookup is for; drawn prose, which does not, shows what it costs. Answers with
and without drafts have to be the same tokens, up to where two of them are as likely as each other
to the last bits; the count of the same ones is printed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from report import keep, provenance, spread

from perilune.core.types import EngineInfo, SamplingParams, TokenRequest
from perilune.engine.admission import admit
from perilune.engine.core import EngineCore
from perilune.engine.speculation import Drafter, LookupDrafter
from perilune.model.api import LanguageModel, load_model
from perilune.text.load import load_chat_format

TEXTS = {
    "list": "".join(
        f'{{"id": {i}, "name": "item {i}", "price": {i * 10}, "in_stock": true}},\n'
        for i in range(1, 13)
    ),
    "code": "".join(
        f"def get_{name}(self):\n    return self._{name}\n\n\ndef set_{name}(self, value):\n"
        f"    self._{name} = value\n\n\n"
        for name in ("width", "height", "depth", "color", "name", "size")
    ),
    "refrain": "The moon is high, the sea is wide, and we go home with the evening tide.\n" * 8,
    "drawn prose": "Once there was a small town at the end of a long valley, and in it lived a",
}
NUM_NEW = 160


SAMPLING = {"drawn prose": SamplingParams(temperature=1.0, seed=1)}
GREEDY = SamplingParams(temperature=0)


def answer(
    model: LanguageModel, prompt: list[int], sampling: SamplingParams, drafter: Drafter | None
) -> dict[str, Any]:
    """One stream through an engine of its own; the time counts from its first token."""
    core = EngineCore(
        model.model,
        device=model.device,
        drafter=drafter,
        max_running=1,
        graphs=model.device.type == "cuda",
    )
    core.warm_up()
    info = EngineInfo(
        model_id="",
        vocab_size=model.config.vocab_size,
        max_context=model.config.max_position_embeddings,
        eos_ids=model.config.eos_ids,
    )
    request = TokenRequest(
        request_id="",
        prompt_ids=tuple(prompt),
        max_tokens=NUM_NEW,
        ignore_eos=True,
        sampling=sampling,
    )
    sequence = admit(request, info)
    core.add(sequence)
    start_s, num_before, num_steps = 0.0, 0, 0
    while core.scheduler.has_work:
        core.step()
        if not start_s and sequence.generated_ids:
            start_s, num_before = time.perf_counter(), len(sequence.generated_ids)
        elif start_s:
            num_steps += 1
    seconds = time.perf_counter() - start_s
    stats = core.stats()
    return {
        "ids": sequence.generated_ids,
        "tokens_per_s": (NUM_NEW - num_before) / seconds,
        "tokens_per_step": (NUM_NEW - num_before) / num_steps,
        "step_ms": 1e3 * seconds / num_steps,
        "drafted": stats.drafted_tokens_total,
        "accepted": stats.accepted_tokens_total,
    }


def measure(
    model: LanguageModel, prompt: list[int], sampling: SamplingParams, rounds: int
) -> dict[str, Any]:
    for drafter in (None, LookupDrafter()):
        answer(model, prompt, sampling, drafter)
    plain, drafted = [], []
    for _ in range(rounds):
        plain.append(answer(model, prompt, sampling, None))
        drafted.append(answer(model, prompt, sampling, LookupDrafter()))
    ratios = [b["tokens_per_s"] / a["tokens_per_s"] for a, b in zip(plain, drafted, strict=True)]
    pairs = list(zip(plain[0]["ids"], drafted[0]["ids"], strict=True))
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
    return {
        "ratio": spread(ratios),
        "plain_tokens_per_s": statistics.median(a["tokens_per_s"] for a in plain),
        "drafted_tokens_per_s": statistics.median(b["tokens_per_s"] for b in drafted),
        "plain_step_ms": statistics.median(a["step_ms"] for a in plain),
        "drafted_step_ms": statistics.median(b["step_ms"] for b in drafted),
        **{key: drafted[0][key] for key in ("tokens_per_step", "drafted", "accepted")},
        "same_tokens": same,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", default="models/nano")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = load_model(args.model, args.device, args.dtype)
    model.warm_up()
    tokenizer = load_chat_format(args.model).tokenizer
    result: dict[str, Any] = {
        **provenance("torch"),
        "dtype": args.dtype,
        "new_tokens": NUM_NEW,
        "rounds": args.rounds,
        "texts": {
            name: measure(model, tokenizer.encode(text), SAMPLING.get(name, GREEDY), args.rounds)
            for name, text in TEXTS.items()
        },
    }
    if model.device.type == "cuda":
        result["hardware"] = torch.cuda.get_device_name(model.device)
    keep(result, args.out)


if __name__ == "__main__":
    main()
