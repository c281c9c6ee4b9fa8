"""From the sequences of a step to its tensors: integers on the host, then two copies.

Legend: as in `step`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from perilune.kernels.common.packing import Packing
from perilune.model.chunk_groups import groups_of
from perilune.model.step import (
    NO_SLOT,
    PAGE,
    SCRATCH_PAGE,
    DecodeRange,
    Decoding,
    Pages,
    Prefilling,
    PrefillRange,
    Step,
    WindowCuts,
)

Column = Sequence[int] | np.ndarray
COLUMNS = 7
"""Of a `PrefillRange`."""


class Limits(NamedTuple):
    """Of the pools that a step runs on."""

    device: torch.device
    num_slots: int
    num_pages: int
    window: int
    """W - 1."""


def make_step(
    limits: Limits,
    decoding: Sequence[Decoding],
    prefilling: Sequence[Prefilling] = (),
    *,
    num_each: int = 1,
    verify: bool = False,
    padded_to: int = 0,
    table_width: int = 1,
) -> Step:
    """The step of these sequences.

    `num_each`: tokens Q of each that decodes; with `verify` they are drafts, for which states are
    only read (`Transformer.accept`). Inert rows fill N up to `padded_to`, and J is `table_width` at
    least: with both fixed, steps that only decode are of one shape.

    Raises:
        ValueError: nothing to do, a slot for two, or numbers that cannot be; the message says
            which. Whether two sequences write one row is not looked at.
    """
    n = max(len(decoding), padded_to)
    if n + len(prefilling) == 0:
        raise ValueError("a step needs a sequence")
    _check_slots(limits, decoding, prefilling)
    padding = n - len(decoding)
    slots = [s.slot for s in decoding] + [NO_SLOT] * padding
    rows = _newest_rows(limits, decoding, num_each)
    rows += [SCRATCH_PAGE * PAGE] * (padding * num_each)
    columns: list[Column] = [slots, [0] * n if verify else [], rows]
    groups = groups_of(prefilling, limits.device)
    if groups:
        columns[2] = np.concatenate([np.array(rows, np.int64), *_new_rows(limits, prefilling)])
        columns.append(_wanted(prefilling, len(rows)))
        columns += [column for group in groups for column in _columns(limits, group)]
    wide, parts = _wide(columns, limits.device)
    narrow = _on(_lengths_and_table(decoding, n, table_width), limits.device)
    decode = None
    if n:
        table_NJ = narrow[n:].view(n, -1)
        keep_N = parts[1] if verify else None
        decode = DecodeRange(parts[0], table_NJ, narrow[:n], keep_N, num_each)
    row_T = parts[2]
    if not groups:
        return Step(decode, (), row_T, None, wide, narrow)
    logit_R = None if parts[3].shape == row_T.shape else parts[3]
    of_groups = [parts[i : i + COLUMNS] for i in range(4, len(parts), COLUMNS)]
    prefill = tuple(_range(*each) for each in zip(groups, of_groups, strict=True))
    return Step(decode, prefill, row_T, logit_R, wide, narrow)


def _check_slots(
    limits: Limits, decoding: Sequence[Decoding], prefilling: Sequence[Prefilling]
) -> None:
    slots = [s.slot for s in decoding] + [s.slot for s in prefilling]
    slots += [cut.slot for s in prefilling for cut in s.cuts]
    if len(set(slots)) < len(slots):
        raise ValueError(f"a slot is written by two: {sorted(slots)}")
    if not 0 <= min(slots, default=0) <= max(slots, default=0) < limits.num_slots:
        raise ValueError(f"slots {sorted(slots)} are not all in 0..{limits.num_slots - 1}")


def _newest_rows(limits: Limits, decoding: Sequence[Decoding], num_each: int) -> list[int]:
    """Of the Q newest tokens of each. Plain integers: numpy's calls take longer than a few."""
    rows: list[int] = []
    for _, pages, end in decoding:
        if end < num_each or len(pages) * PAGE < end:
            raise ValueError(f"{end} tokens, {num_each} of them new, on {len(pages)} pages")
        rows += [int(pages[t // PAGE]) * PAGE + t % PAGE for t in range(end - num_each, end)]
    if rows:
        _check_pages(limits, min(rows) // PAGE, max(rows) // PAGE)
    return rows


def _check_pages(limits: Limits, lowest: int, highest: int) -> None:
    if not SCRATCH_PAGE < lowest <= highest < limits.num_pages:
        raise ValueError(f"pages {lowest}..{highest} are not in 1..{limits.num_pages - 1}")


def _rows(limits: Limits, pages: Pages, first: int, end: int) -> np.ndarray:
    """Of tokens `first` to `end` of a sequence."""
    used = np.asarray(pages[: -(-end // PAGE)], np.int64)
    if len(used) * PAGE < end:
        raise ValueError(f"{end} tokens on {len(pages)} pages")
    _check_pages(limits, int(used.min()), int(used.max()))
    token = np.arange(first, end)
    return used[token // PAGE] * PAGE + token % PAGE


def _new_rows(limits: Limits, prefilling: Sequence[Prefilling]) -> list[np.ndarray]:
    for s in prefilling:
        cuts = [0, *(cut.after for cut in s.cuts)]
        rising = all(a < b for a, b in pairwise(cuts))
        if s.num_cached < 0 or s.num_new < 1 or not 0 <= s.num_logits <= s.num_new:
            raise ValueError(
                f"{s.num_new} new tokens after {s.num_cached}, logits of {s.num_logits}"
            )
        if not rising or cuts[-1] > s.num_new:
            raise ValueError(f"cuts after {cuts[1:]} of {s.num_new} tokens")
    return [_rows(limits, s.pages, s.num_cached, s.num_cached + s.num_new) for s in prefilling]


def _wanted(prefilling: Sequence[Prefilling], num_decoded: int) -> list[int]:
    """The tokens whose logits are."""
    wanted, end = [*range(num_decoded)], num_decoded
    for s in prefilling:
        end += s.num_new
        wanted += range(end - s.num_logits, end)
    return wanted


def _columns(limits: Limits, chunks: Sequence[Prefilling]) -> list[Column]:
    """What `_range` takes."""
    is_new = [s.num_cached == 0 for s in chunks]
    keys: Column = []
    if not all(is_new):
        keys = np.concatenate([_rows(limits, s.pages, 0, s.num_cached + s.num_new) for s in chunks])
    return [
        [s.slot for s in chunks],
        is_new,
        keys,
        [cut.slot for s in chunks for cut in s.cuts],
        *_window_cuts(chunks, limits.window),
    ]


def _window_cuts(chunks: Sequence[Prefilling], window: int) -> tuple[list[int], ...]:
    token_I: list[int] = []
    place_O: list[int] = []
    carried_O: list[int] = []
    first = 0
    for i, s in enumerate(chunks):
        for cut in s.cuts:
            for back in range(window, 0, -1):
                token = cut.after - back
                if token < 0:
                    place_O.append(len(token_I))
                    carried_O.append((i + 1) * window + token)
                token_I.append(first + max(token, 0))
        first += s.num_new
    return token_I, place_O, carried_O


def _range(chunks: Sequence[Prefilling], columns: Sequence[Tensor]) -> PrefillRange:
    slot_M, new_M, key_row_S, cut_slot_E, *window_cuts = columns
    is_new = [s.num_cached == 0 for s in chunks]
    cuts = tuple(tuple(cut.after for cut in s.cuts) for s in chunks)
    return PrefillRange(
        packing=Packing.of([s.num_new for s in chunks]),
        keys=Packing.of([s.num_cached + s.num_new for s in chunks]),
        slot_M=slot_M,
        new_M=new_M.bool() if any(is_new) else None,
        all_new=all(is_new),
        key_row_S=None if all(is_new) else key_row_S,
        cuts=cuts if any(cuts) else None,
        cut_slot_E=cut_slot_E,
        window_cuts=WindowCuts(*window_cuts),
    )


def _lengths_and_table(decoding: Sequence[Decoding], n: int, table_width: int) -> np.ndarray:
    """N lengths, then the table row by row."""
    used = [-(-s.num_tokens // PAGE) for s in decoding]
    width = max([table_width, *used])
    narrow = np.zeros(n * (1 + width), np.int32)
    narrow[: len(used)] = [s.num_tokens for s in decoding]
    for i, (s, count) in enumerate(zip(decoding, used, strict=True)):
        first = n + i * width
        narrow[first : first + count] = s.pages[:count]
    return narrow


def _wide(columns: Sequence[Column], device: torch.device) -> tuple[Tensor, tuple[Tensor, ...]]:
    """All columns in one tensor, and a view of each."""
    if all(isinstance(column, list) for column in columns):
        joined = np.array([*chain.from_iterable(columns)], np.int64)
    else:
        joined = np.concatenate([np.asarray(column, np.int64) for column in columns])
    wide = _on(joined, device)
    return wide, wide.split([len(column) for column in columns])


def _on(numbers: np.ndarray, device: torch.device) -> Tensor:
    """On the device, without waiting for what runs there."""
    tensor = torch.from_numpy(numbers)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
