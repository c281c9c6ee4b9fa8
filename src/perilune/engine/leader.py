"""The first rank's model: whatever it does to its tensors, the other ranks do too.

The engine's process is the first rank. It alone schedules and samples; the others follow, each in a
process of its own (`follower`), and all compute the same logits. When one of them ends, the engine
ends: those who have asked get errors, and the supervisor starts all of them again.

Legend: T packed tokens, R rows of logits, V vocabulary.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from msgspec.structs import replace
from torch import Tensor

from perilune.core.errors import UnsupportedError
from perilune.engine.errors import RanksApartError
from perilune.engine.hangup import when_gone
from perilune.engine.launch import EngineProcess
from perilune.engine.rank_wire import (
    Accept,
    CopyPages,
    CopySlots,
    Feed,
    Join,
    NewPools,
    ToRank,
)
from perilune.engine.wire import VERSION, frame
from perilune.model.api import LanguageModel, load_model
from perilune.model.model import Transformer, Verified
from perilune.model.parse_config import load_config
from perilune.model.pools import Pools
from perilune.model.ranks import Ranks, meet, share_of
from perilune.model.step import Decoding, Prefilling, Step

logger = logging.getLogger(__name__)

FOLLOWER = "perilune.engine.follower"


class Others(Protocol):
    def tell(self, message: ToRank) -> None: ...


class Followers:
    """The processes of all ranks but the first. They end with this one, and this one with them."""

    def __init__(self, join: Join, store: int) -> None:
        """`join` is the first rank's own; `store` is a descriptor that they inherit."""
        self._processes = [EngineProcess(FOLLOWER, pass_fds=[store]) for _ in range(join.size - 1)]
        for rank, process in enumerate(self._processes, 1):
            when_gone(process.sock.fileno(), partial(_end, rank))
            process.sock.sendall(frame(replace(join, rank=rank, device=_of_rank(join, rank))))

    def tell(self, message: ToRank) -> None:
        data = frame(message)
        for process in self._processes:
            process.sock.sendall(data)


def _of_rank(join: Join, rank: int) -> str:
    return f"cuda:{rank}" if join.device.startswith("cuda") else join.device


def _end(rank: int) -> None:
    logger.critical("the process of rank %d has ended, and the engine with it", rank)
    os._exit(1)  # the others may wait for that one for ever


class Shared(NamedTuple):
    loaded: LanguageModel
    """The first rank's part."""
    model: SharedModel


def load_shared(
    model_dir: str,
    device: torch.device,
    dtype: str,
    *,
    size: int,
    threads: int | None = None,
    progress: bool = False,
) -> Shared:
    """Loads a checkpoint on `size` GPUs, or with `size` processes on a CPU; as `load_model`.

    Raises:
        ConfigError: the ranks cannot have equal parts.
        UnsupportedError: there are not so many GPUs, or the system is not Linux.
    """
    share_of(load_config(Path(model_dir)), Ranks(0, size))
    gpus = torch.cuda.device_count() if device.type == "cuda" else size
    if gpus < size:
        raise UnsupportedError(f"{size} ranks need as many GPUs; this machine has {gpus}")
    if not hasattr(os, "memfd_create"):
        raise UnsupportedError("several ranks run on Linux alone")
    # A file without a name: it is gone with the last process that has it.
    store = os.memfd_create("perilune-ranks", 0)
    place = f"/proc/self/fd/{store}"
    own = str(torch.device(device.type, 0) if device.type == "cuda" else device)
    join = Join(VERSION, 0, size, place, model_dir, own, dtype, threads)
    followers = Followers(join, store)
    ranks = meet(0, size, Path(place), torch.device(own))
    loaded = load_model(model_dir, own, dtype, progress=progress, ranks=ranks)
    return Shared(loaded, SharedModel(loaded.model, followers, ranks))


class Planned(NamedTuple):
    step: Step
    feed: Feed


class SharedPools:
    """A `StepPools` of the first rank."""

    def __init__(self, pools: Pools, others: Others) -> None:
        self.own = pools
        self._others = others

    @property
    def slot_nbytes(self) -> int:
        """Of this rank; so is `page_nbytes`."""
        return self.own.slot_nbytes

    @property
    def page_nbytes(self) -> int:
        return self.own.page_nbytes

    def step(
        self,
        decoding: Sequence[Decoding],
        prefilling: Sequence[Prefilling] = (),
        *,
        num_each: int = 1,
        verify: bool = False,
    ) -> Planned:
        step = self.own.step(decoding, prefilling, num_each=num_each, verify=verify)
        return Planned(step, Feed.of(decoding, prefilling, num_each=num_each, verify=verify))

    def decode_step(
        self,
        slot_N: Tensor,
        table_NJ: Tensor,
        length_N: Tensor,
        row_T: Tensor,
        keep_N: Tensor | None = None,
    ) -> Step:
        return self.own.decode_step(slot_N, table_NJ, length_N, row_T, keep_N)

    def copy_slots(self, pairs: Sequence[tuple[int, int]]) -> None:
        with all_or_none():
            self._others.tell(CopySlots([*pairs]))
            self.own.copy_slots(pairs)

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        with all_or_none():
            self._others.tell(CopyPages([*pairs]))
            self.own.copy_pages(pairs)


class SharedModel:
    """A `StepModel` of the first rank."""

    def __init__(self, model: Transformer, others: Others, ranks: Ranks) -> None:
        self.page_len = model.page_len
        self._model = model
        self.others = others
        self._ranks = ranks

    def new_pools(self, *, slots: int, pages: int) -> SharedPools:
        with all_or_none():
            self.others.tell(NewPools(slots, pages))
            return SharedPools(self._model.new_pools(slots=slots, pages=pages), self.others)

    def step(self, token_ids_T: Tensor, pools: SharedPools, step: Planned | Step) -> Tensor:
        """fp32 logits [R, V]. A `Step` is part of a graph, which the others have been told of.

        Raises:
            RanksApartError: whatever it was that failed, the others may have gone on.
        """
        with all_or_none():
            if isinstance(step, Step):
                return self._model.step(token_ids_T, pools.own, step)
            self.others.tell(step.feed)
            self._ranks.handed_out(token_ids_T)
            return self._model.step(token_ids_T, pools.own, step.step)

    def verify(self, token_ids_T: Tensor, pools: SharedPools, step: Planned | Step) -> Verified:
        """As `step`."""
        with all_or_none():
            if isinstance(step, Step):
                return self._model.verify(token_ids_T, pools.own, step)
            self.others.tell(step.feed)
            self._ranks.handed_out(token_ids_T)
            return self._model.verify(token_ids_T, pools.own, step.step)

    def accept(
        self, verified: Verified, pools: SharedPools, step: Planned | Step, keep_N: Tensor
    ) -> None:
        """As `step`."""
        with all_or_none():
            if not isinstance(step, Step):
                self.others.tell(Accept(len(keep_N)))
                self._ranks.handed_out(keep_N)
                step = step.step
            self._model.accept(verified, pools.own, step, keep_N)


@contextmanager
def all_or_none() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise RanksApartError(
            f"ranks no longer do the same: {type(error).__name__}: {error}"
        ) from error
