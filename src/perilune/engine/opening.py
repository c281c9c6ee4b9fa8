"""A checkpoint directory as an engine."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from perilune.core.env import num_threads
from perilune.core.errors import ConfigError
from perilune.core.types import EngineInfo, TokenTable
from perilune.engine.admission import admit
from perilune.engine.cache_sizes import STATE_SHARE, cost_of, default_bytes, room_of
from perilune.engine.cache_tiers import tiers_of
from perilune.engine.client import EngineClient
from perilune.engine.core import EngineCore
from perilune.engine.decode_graphs import DecodeGraphs
from perilune.engine.draft_model import DraftModel
from perilune.engine.errors import RanksApartError
from perilune.engine.grammar_compiler import GrammarCompiler
from perilune.engine.host import Opened
from perilune.engine.leader import load_shared
from perilune.engine.pooled_memory import Room
from perilune.engine.retention import Retention
from perilune.engine.shared_graphs import SharedGraphs
from perilune.engine.speculation import MAX_ROWS, FirstOf, LookupDrafter
from perilune.engine.step_model import StepModel
from perilune.engine.thread import EngineThread
from perilune.kernels.common import jit_cache
from perilune.kernels.registry import resolved, spec
from perilune.model.api import LanguageModel, load_model
from perilune.model.device import device_of

RETENTION = Retention(interval=8192, align=64, min_gap=16, max_cuts=16)
"""The grid is for what comes back without its last tokens: where a template writes an answer's head
anew, a conversation loses 63 tokens at most, and not the turn."""


def open_core(
    model_dir: str,
    *,
    max_running: int = 32,
    max_waiting: int = 256,
    prefill_budget: int | None = None,
    cache_bytes: int | None = None,
    state_share: float = STATE_SHARE,
    prefix_cache: bool = True,
    state_interval: int = RETENTION.interval,
    state_align: int = RETENTION.align,
    host_cache_bytes: int | None = None,
    disk_cache: str | None = None,
    tensor_parallel: int = 1,
    speculation: bool = True,
    draft_model: str | None = None,
    threads: int | None = None,
    device: str = "cpu",
    dtype: str = "float32",
    token_table: TokenTable | None = None,
    progress: bool = False,
) -> Opened:
    """Loads a checkpoint directory and makes an engine of it; its name is the directory's. For
    `Supervisor`, whose process calls it, so that the supervisor's own has no torch.

    `prefill_budget`: prompt tokens of a step, by default 256 on a CPU and 4096 on a GPU, which
    fewer would leave idle.
    `cache_bytes`: memory for states and latents of running sequences and of cached prefixes, by
    default what `cache_sizes.default_bytes` says.
    `state_share`: of that, for states that are kept, beside one for each that runs.
    `prefix_cache`: whether prompts go on from what earlier ones have left.
    `state_interval`, `state_align`: where in a prompt states are kept (`retention`), beside its end
    and where others have left it.
    `host_cache_bytes`: host memory for what the prefix cache has no room for on the card, by
    default none, or what a disk needs.
    `disk_cache`: a folder for what finds no room there either; its files go with the engine.
    `tensor_parallel`: GPUs that share the model, or on a CPU processes; each has `cache_bytes`. In
    an engine's process alone: where the process of one of them ends, this one does.
    `speculation`: whether tokens are guessed from the text before them.
    `draft_model`: checkpoint directory of a model that guesses where the text has no guess.
    `threads`: torch threads, by default what PERILUNE_THREADS says, else torch's choice.
    `device`: `cpu`, `cuda`, or `auto` for whatever is here.
    `token_table`: the vocabulary as bytes, without which no answer can be held to a grammar.
    `progress`: says on standard error what takes long.

    Raises:
        ConfigError, CheckpointError, UnsupportedError: as `perilune.model.api.load_model`; the
            draft model has another vocabulary, or there is to be no speculation; memory behind a
            prefix cache that is off; memory or numbers that leave no room to run.
    """
    if not prefix_cache and (host_cache_bytes or disk_cache):
        raise ConfigError("host memory and files are of no use to a prefix cache that is off")
    retention = replace(RETENTION, interval=state_interval, align=state_align)
    place = device_of(device)
    if progress and place.type == "cpu" and jit_cache.is_empty():
        print("perilune: compiling loops for this CPU, once (about 20 s)", file=sys.stderr)
    threads = num_threads() if threads is None else threads
    progress = progress and sys.stderr.isatty()
    tiers = tiers_of(host_cache_bytes, disk_cache, num_ranks=tensor_parallel)
    model: StepModel
    if tensor_parallel == 1:
        loaded = load_model(model_dir, str(place), dtype, progress=progress)
        model = loaded.model
    else:
        loaded, model = load_shared(
            model_dir, place, dtype, size=tensor_parallel, threads=threads, progress=progress
        )
    cost = cost_of(loaded.model)
    max_context = loaded.config.max_position_embeddings
    if cache_bytes is None:
        cache_bytes = default_bytes(loaded.device, cost, max_running, max_context)
    room = room_of(
        cache_bytes,
        cost,
        page_len=loaded.model.page_len,
        max_running=max_running,
        max_context=max_context,
        state_share=state_share,
    )
    drafter = LookupDrafter() if speculation else None
    if draft_model is not None:
        if drafter is None:
            raise ConfigError("a draft model is of no use without speculation")
        drafter = FirstOf(drafter, _draft_model(draft_model, loaded, dtype, room))
    core = EngineCore(
        model,
        room=room,
        cost=cost if prefix_cache else None,
        retention=retention,
        tiers=tiers,
        drafter=drafter,
        device=loaded.device,
        max_running=max_running,
        max_waiting=max_waiting,
        prefill_budget=prefill_budget or (256 if place.type == "cpu" else 4096),
        max_context=max_context,
        # Those that ranks share have run on CPUs alone so far.
        graphs=None if tensor_parallel == 1 else False,
        new_graphs=DecodeGraphs if tensor_parallel == 1 else SharedGraphs,
    )
    return Opened(
        core=core,
        info=_info(loaded, Path(model_dir), dtype=dtype, max_running=max_running, room=room),
        admit=partial(admit, grammars=_grammars(loaded, token_table)),
        prepare=partial(_prepare, core, threads),
        # The device's context is lost, or some ranks have gone on without others.
        fatal=(torch.AcceleratorError, RanksApartError),
    )


def open_engine(model_dir: str | Path, **options: Any) -> EngineClient:
    """An engine in a thread of this process, on what `open_core` makes of these arguments."""
    return EngineClient(EngineThread(open_core(str(model_dir), **options)))


def _draft_model(directory: str, loaded: LanguageModel, dtype: str, room: Room) -> DraftModel:
    """On the model's device, with as many pages as the model has."""
    draft = load_model(directory, str(loaded.device), dtype)
    size, drafted = loaded.config.vocab_size, draft.config.vocab_size
    if drafted != size:
        raise ConfigError(
            f"{directory} cannot draft: its vocabulary has {drafted} tokens, the model's {size}"
        )
    return DraftModel(draft.model, pages=room.pages, sequences=MAX_ROWS // 2, device=loaded.device)


def _grammars(loaded: LanguageModel, table: TokenTable | None) -> GrammarCompiler | None:
    config = loaded.config
    if table is None or not config.eos_ids:  # nothing would end an answer
        return None
    return GrammarCompiler(table, vocab_size=config.vocab_size, eos_ids=config.eos_ids)


def _prepare(core: EngineCore, threads: int | None) -> None:
    if threads is not None:
        torch.set_num_threads(threads)  # of the calling thread only
    core.warm_up()


def kernels_for(device_type: str) -> dict[str, list[str]]:
    """The ops that the model uses, by whether they have a backend for the device."""
    used = resolved()
    own = [name for name in used if device_type in spec(name).backends]
    return {"own_kernels": own, "reference_kernels": [name for name in used if name not in own]}


def _info(
    loaded: LanguageModel, directory: Path, *, dtype: str, max_running: int, room: Room
) -> EngineInfo:
    return EngineInfo(
        model_id=directory.resolve().name,
        vocab_size=loaded.config.vocab_size,
        max_context=loaded.config.max_position_embeddings,
        eos_ids=loaded.config.eos_ids,
        details={
            "device": str(loaded.device),
            "dtype": dtype,
            "max_running": max_running,
            "cache_tokens": (room.pages - 1) * loaded.model.page_len,
            "cache_slots": room.slots,
            "tensor_parallel": loaded.model.ranks.size,
            **kernels_for(loaded.device.type),
        },
    )
