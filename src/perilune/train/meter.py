"""How fast a run trains."""

from __future__ import annotations

import time

from perilune.model.parse_config import parse_config
from perilune.train.config import TrainConfig
from perilune.train.data import Batch
from perilune.train.flops import model_flops, peak_flops, tokens_and_pairs
from perilune.train.team import ALONE, Team


class Meter:
    """Adds up the steps since it was last read, without what lies between them (validation)."""

    def __init__(self, config: TrainConfig, team: Team = ALONE) -> None:
        self._flops = model_flops(parse_config(config.model))
        self._peak = peak_flops(config.device, config.compute_dtype)
        self._ranks = team.size
        self._started = time.perf_counter()
        self._clear()

    def start(self) -> None:
        self._started = time.perf_counter()

    def stop(self, batch: Batch) -> None:
        """Ends a step on the batch of all ranks."""
        self._seconds += time.perf_counter() - self._started
        self._tokens += tokens_and_pairs(batch)[0]
        self._done += self._flops.of(batch)

    def read(self) -> dict[str, float]:
        """Tokens a second of all ranks, TFLOP/s of one, and its share of the peak if that is
        known."""
        seconds = max(self._seconds, 1e-9)
        each = self._done / seconds / self._ranks
        rates = {"tokens_per_s": round(self._tokens / seconds, 1), "tflops": round(each / 1e12, 4)}
        if self._peak is not None:
            rates["mfu"] = round(each / self._peak, 4)
        self._clear()
        return rates

    def _clear(self) -> None:
        self._seconds, self._tokens, self._done = 0.0, 0, 0
