"""A checkpoint as a Python object, for experiments: `perilune.load_model(dir)`.

Legend: B sequences, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from operator import index
from pathlib import Path
from typing import Any, SupportsIndex

import torch
from torch import Tensor

from perilune.core.errors import ContextLengthError, RequestError, UnsupportedError
from perilune.kernels.common.packing import Packing
from perilune.model.config import ModelConfig
from perilune.model.device import device_of
from perilune.model.load import load_checkpoint
from perilune.model.lone import LoneSequence
from perilune.model.model import Transformer
from perilune.model.ranks import ALONE, Ranks

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


class LanguageModel:
    """Weights and configuration, ready to run. The weights are frozen: some are held twice, and a
    change in place would reach one form only."""

    def __init__(self, model: Transformer, skipped: tuple[str, ...] = ()) -> None:
        self.model = model.freeze()
        self.skipped = skipped
        """Tensors of the checkpoint that a text model has no use for (vision)."""

    @property
    def config(self) -> ModelConfig:
        return self.model.config

    @property
    def device(self) -> torch.device:
        return self.model.head_weight.device

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Decodes one token, so that no request waits for what is compiled at its first use: on a
        CPU some twenty seconds, once for an installation. A GPU reads two prompts before: what
        Triton compiles is fit for sizes that are multiples of 16, or for any."""
        sequence = LoneSequence(self.model)
        for count in (1,) if self.device.type == "cpu" else (512, 2):
            sequence.prefill(torch.zeros(count, dtype=torch.long, device=self.device))
        sequence.decode(torch.zeros(1, dtype=torch.long, device=self.device))

    @torch.inference_mode()
    def logits(self, ids_BT: Any) -> Tensor:
        """fp32 logits [B, T, V] of token ids [B, T]: a tensor, an array or nested lists.

        Raises:
            RequestError: not a non-empty block of integers, or an id outside the vocabulary.
            ContextLengthError: T exceeds the model's context.
        """
        ids = self._check(ids_BT)
        if ids.ndim != 2:
            raise RequestError(f"token ids must have two dimensions [B, T], not {ids.ndim}")
        rows, length = ids.shape
        self._check_length(length)
        return self.model(ids.flatten(), Packing.of([length] * rows)).view(rows, length, -1)

    @torch.inference_mode()
    def generate(
        self,
        prompt_ids: Sequence[int] | Tensor,
        max_tokens: int,
        *,
        temperature: float = 0.0,
        seed: int | None = None,
        stop_ids: Collection[int] | None = None,
    ) -> list[int]:
        """Continues `prompt_ids` by at most `max_tokens` ids.

        Temperature 0 takes the most likely token, the lowest id on a tie. The first of `stop_ids`
        (None: the configuration's eos) ends the text and is its last id.

        Raises:
            RequestError: an empty prompt, an id outside the vocabulary, a bad number.
            ContextLengthError: prompt and `max_tokens` exceed the model's context.
        """
        ids = self._check(prompt_ids)
        if ids.ndim != 1:
            raise RequestError(f"prompt_ids must have one dimension, not {ids.ndim}")
        # Half a token more would never be reached, and the loop would not end.
        if not isinstance(max_tokens, SupportsIndex) or max_tokens < 1:
            raise RequestError(f"max_tokens must be at least 1, an integer, not {max_tokens!r}")
        if not 0 <= temperature < float("inf"):
            raise RequestError(f"temperature must be 0 or more, not {temperature}")
        if seed is not None and not (
            isinstance(seed, SupportsIndex) and -(2**63) <= index(seed) < 2**64
        ):
            raise RequestError(f"seed must be an integer of 64 bits, not {seed!r}")
        self._check_length(len(ids) + max_tokens)
        stops = self.config.eos_ids if stop_ids is None else frozenset(stop_ids)
        generator = torch.Generator(self.device)
        generator.seed() if seed is None else generator.manual_seed(index(seed))
        sequence, out = LoneSequence(self.model), []
        [logits_V] = sequence.prefill(ids)
        while True:
            out.append(_draw(logits_V, temperature, generator))
            if out[-1] in stops or len(out) == max_tokens:
                return out
            [logits_V] = sequence.decode(torch.tensor(out[-1:], device=self.device))

    def _check(self, token_ids: Any) -> Tensor:
        try:
            ids = torch.as_tensor(token_ids)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise RequestError(f"token ids must be a block of integers: {error}") from None
        if ids.numel() == 0:
            raise RequestError("there must be at least one token id")
        if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
            raise RequestError(f"token ids must be integers, not {ids.dtype}")
        ids = ids.to(self.device, torch.long)
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= self.config.vocab_size:
            bad = low if low < 0 else high
            raise RequestError(f"token id {bad} is outside 0..{self.config.vocab_size - 1}")
        return ids

    def _check_length(self, length: int) -> None:
        limit = self.config.max_position_embeddings
        if length > limit:
            raise ContextLengthError(f"{length} tokens exceed the model's context of {limit}")


def _draw(logits_V: Tensor, temperature: float, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits_V.argmax())
    # In fp64 and with the highest logit at zero, a tiny temperature still gives probabilities.
    scaled_V = (logits_V.double() - logits_V.max()) / temperature
    return int(torch.multinomial(scaled_V.softmax(dim=-1), 1, generator=generator))


def load_model(
    directory: str | Path,
    device: str = "cpu",
    dtype: str = "float32",
    *,
    progress: bool = False,
    ranks: Ranks = ALONE,
) -> LanguageModel:
    """Verifies and loads a checkpoint directory of either family; `progress` shows a bar. With
    `ranks`, this rank's part: each has to load its own, and then to be called as all others are.

    `device`: `cpu`, `cuda`, or `auto` for whatever is here; `dtype`: float32, bfloat16 or float64.
    On a GPU, MXFP4 experts stay packed.

    Raises:
        ConfigError, CheckpointError: the files are wrong; the message names file and tensor.
        UnsupportedError: an unknown `dtype`, or a `device` that this machine does not have.
    """
    if dtype not in DTYPES:
        raise UnsupportedError(f"dtype must be one of {', '.join(DTYPES)}, not {dtype!r}")
    place = device_of(device)
    loaded = load_checkpoint(
        directory,
        device=place,
        dtype=DTYPES[dtype],
        keep_packed=place.type == "cuda" and dtype != "float64",
        progress=progress,
        ranks=ranks,
    )
    model = LanguageModel(loaded.model, loaded.report.skipped)
    model.warm_up()
    return model
