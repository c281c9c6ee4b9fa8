"""The process of a rank that is not the first: `python -m perilune.engine.follower FD`, where FD is
a connected socket to the first one's, which is the engine's.

It loads its part of the model and then does what it is told. It ends with the engine's process.
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from perilune.engine.decode_graphs import Capacity, DecodeGraphs
from perilune.engine.draft_buffers import Shape
from perilune.engine.draft_graphs import DraftGraphs
from perilune.engine.errors import WireError
from perilune.engine.hangup import when_gone
from perilune.engine.lane import lane_of
from perilune.engine.rank_wire import (
    Accept,
    AcceptDrafts,
    Capture,
    CaptureDrafts,
    CopyPages,
    CopySlots,
    Feed,
    Join,
    NewDraftGraphs,
    NewGraphs,
    NewPools,
    Replay,
    ReplayDrafts,
    ToRank,
    decode_to_rank,
)
from perilune.engine.wire import VERSION, Frames
from perilune.model.api import load_model
from perilune.model.model import Transformer, Verified
from perilune.model.pools import Pools
from perilune.model.ranks import Ranks, meet
from perilune.model.step import Step

logger = logging.getLogger(__name__)

_READ_BYTES = 2**16
_LAST_S = 5.0
"""How long a rank that could not start waits: if the first one could not either, it says why."""


def main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM):  # meant for the server, which ends the engine
        signal.signal(number, signal.SIG_IGN)
    faulthandler.enable()
    logging.basicConfig(level=logging.WARNING, format="perilune: %(levelname)s: %(message)s")
    sock = socket.socket(fileno=int(sys.argv[1]))
    sock.set_inheritable(False)
    when_gone(sock.fileno(), lambda: os._exit(0))
    told = messages(sock)
    join = next(told, None)
    if not isinstance(join, Join):
        return 1
    try:
        follower = _joined(join)
        gc.freeze()
        for message in told:
            follower.take(message)
    except Exception:
        logger.critical("rank %d ends", join.rank, exc_info=True)
        threading.Event().wait(_LAST_S)
        os._exit(1)  # the others may wait for this one for ever
    return 0


def messages(sock: socket.socket) -> Iterator[ToRank]:
    """As they come, until the other end closes."""
    frames = Frames()
    while data := sock.recv(_READ_BYTES):
        for body in frames.feed(data):
            yield decode_to_rank(body)


def _joined(join: Join) -> Follower:
    if join.version != VERSION:
        raise WireError(f"this rank is of {VERSION!r}, the engine of {join.version!r}")
    device = torch.device(join.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if join.threads is not None:
        torch.set_num_threads(join.threads)
    ranks = meet(join.rank, join.size, Path(join.store), device)
    loaded = load_model(join.model_dir, join.device, join.dtype, ranks=ranks)
    return Follower(loaded.model, ranks, device)


class Follower:
    """Does to its own tensors what the first rank does to its."""

    def __init__(self, model: Transformer, ranks: Ranks, device: torch.device) -> None:
        self._model = model
        self._ranks = ranks
        self._device = device
        self._pools: Pools | None = None
        self._graphs: DecodeGraphs | None = None
        self._draft_graphs: DraftGraphs | None = None
        self._verified: tuple[Verified, Step] | None = None

    @torch.inference_mode()
    def take(self, message: ToRank) -> None:
        if isinstance(message, NewPools):
            self._pools = self._model.new_pools(slots=message.slots, pages=message.pages)
            return
        pools = self._pools
        assert pools is not None, message
        match message:
            case CopySlots(pairs):
                pools.copy_slots(pairs)
            case CopyPages(pairs):
                pools.copy_pages(pairs)
            case Feed():
                step = pools.step(
                    *message.sequences(), num_each=message.num_each, verify=message.verify
                )
                ids_T = self._handed_out(step.num_tokens)
                if message.verify:
                    self._verified = self._model.verify(ids_T, pools, step), step
                else:
                    self._model.step(ids_T, pools, step)
            case Accept(num_sequences):
                assert self._verified is not None, message
                verified, step = self._verified
                self._model.accept(verified, pools, step, self._handed_out(num_sequences))
            case NewGraphs():
                capacity = Capacity(message.rows, message.pages)
                lane = lane_of(self._device)
                self._graphs = DecodeGraphs(self._model, pools, capacity, self._device, lane)
            case Capture(rows):
                self._made_graphs.graph(rows)
            case Replay(rows, width, integers):
                self._made_graphs.replay(rows, width, integers)
            case NewDraftGraphs():
                self._draft_graphs = self._made_graphs.for_drafts()
            case CaptureDrafts(sequences, each):
                self._made_draft_graphs.graphs(Shape(sequences, each))
            case ReplayDrafts(sequences, each, width, integers):
                self._made_draft_graphs.replay(Shape(sequences, each), width, integers)
            case AcceptDrafts(sequences, each, num_kept):
                self._made_draft_graphs.accept(Shape(sequences, each), num_kept)
            case Join():
                raise WireError("a rank joins once")

    @property
    def _made_graphs(self) -> DecodeGraphs:
        assert self._graphs is not None
        return self._graphs

    @property
    def _made_draft_graphs(self) -> DraftGraphs:
        assert self._draft_graphs is not None
        return self._draft_graphs

    def _handed_out(self, count: int) -> Tensor:
        return self._ranks.handed_out(torch.empty(count, dtype=torch.long, device=self._device))


if __name__ == "__main__":
    sys.exit(main())
