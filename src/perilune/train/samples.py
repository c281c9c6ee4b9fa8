"""Ten answers of a trained model to fixed prompts with fixed seeds: what a card shows, unpicked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from perilune.core.types import ChatRequest, Message, SamplingParams, TextPart
from perilune.engine.generate import generate
from perilune.model.api import load_model
from perilune.text.chat import ParsedMessage, parse_message
from perilune.text.load import load_chat_format

TEMPERATURE, TOP_P, MAX_TOKENS = 0.7, 0.95, 160

WEATHER: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
PROMPTS: tuple[tuple[str, tuple[Mapping[str, Any], ...]], ...] = (
    ("Hello! Who are you?", ()),
    ("What is the capital of France?", ()),
    ("Tell me a short story about a fox and the moon.", ()),
    ("What is 17 + 25?", ()),
    ("Write a Python function that reverses a string.", ()),
    ("What is the weather in Oslo?", (WEATHER,)),
    ("Explain what a database index is.", ()),
    ("Give me three tips for a good night's sleep.", ()),
    ("What does the word 'lantern' mean?", ()),
    ("I feel a little sad today.", ()),
)
"""Prompt number i, from 0, is sampled with seed i."""


class Sample(NamedTuple):
    prompt: str
    seed: int
    answer: ParsedMessage
    is_cut: bool
    """MAX_TOKENS came before the end."""


def draw_samples(model_dir: Path) -> Iterator[Sample]:
    """The answers of the checkpoint in `model_dir`, in order."""
    model, chat_format = load_model(model_dir), load_chat_format(model_dir)
    for seed, (prompt, tools) in enumerate(tqdm(PROMPTS, desc="samples", disable=None)):
        request = ChatRequest(
            request_id=str(seed),
            model=model_dir.name,
            messages=(Message(role="user", content=(TextPart(text=prompt),)),),
            tools=tools,
        )
        generated = generate(
            model,
            [chat_format.encode(request)],
            SamplingParams(temperature=TEMPERATURE, top_p=TOP_P, seed=seed),
            max_tokens=MAX_TOKENS,
            stop_ids=chat_format.stop_ids,
        )[0]
        answer = parse_message(chat_format.parser(request), generated.token_ids)
        yield Sample(prompt, seed, answer, generated.finish_reason == "length")
