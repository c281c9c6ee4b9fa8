"""The smallest inputs that showed faults of other engines, at the level of a step over pools."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from pooled_batch import CPU, Batch, close

from perilune.kernels.common.packing import Packing
from perilune.kernels.registry import recorded
from perilune.model.init import random_weights
from perilune.model.model import Transformer
from perilune.model.parse_config import parse_config
from perilune.model.pools import Pools
from perilune.model.presets import tiny_k3, tiny_kimi_linear
from perilune.model.step import NO_SLOT, Decoding

FAMILIES = {"k3": tiny_k3, "kimi_linear": tiny_kimi_linear}


def make_model(family: str) -> Transformer:
    raw = FAMILIES[family](hidden_size=40, num_hidden_layers=4)
    model = random_weights(Transformer(parse_config(raw)), torch.Generator().manual_seed(6))
    return model.bfloat16().float().freeze()


MODELS = {family: make_model(family) for family in FAMILIES}


@pytest.fixture(params=FAMILIES)
def model(request) -> Transformer:
    return MODELS[request.param]


def draw(*lengths: int, seed: int = 3) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 128, (n,), generator=generator) for n in lengths]


def same_states(a: Batch, slot_a: int, b: Batch, slot_b: int) -> bool:
    pools = zip(a.tensors[:2], b.tensors[:2], strict=True)
    return all(torch.equal(x[:, slot_a], y[:, slot_b]) for x, y in pools)


@pytest.mark.parametrize(("family", "length"), [("k3", 4096), ("kimi_linear", 400)])
def test_a_long_prompt_in_two_chunks_is_the_prompt_in_one(family: str, length: int) -> None:
    """A state handed over the wrong way round shows after the first chunk."""
    [ids_T] = draw(length)
    batch = Batch(MODELS[family], pages=140)
    whole, halves = batch.open(ids_T), batch.open(ids_T)
    batch.run([], [(whole, length, [])])
    batch.run([], [(halves, length // 2, [])])
    states_HKV = batch.pools.state_LSHKV[:, halves.slot]
    assert (states_HKV - states_HKV.mT).abs().max() > 0.1 * states_HKV.abs().max()
    batch.run([], [(halves, length // 2, [])])
    for pool in batch.tensors[:2]:
        close(pool[:, halves.slot], pool[:, whole.slot])
    close(halves.logits[length], whole.logits[length])


@pytest.mark.parametrize("cached", [0, 33])
def test_chunks_of_a_step_count_from_their_own_start(model, cached) -> None:
    texts = draw(cached + 100, cached + 200)
    together, alone = Batch(model), Batch(model)
    pairs = [[batch.open(ids_T) for ids_T in texts] for batch in (together, alone)]
    if cached:
        together.run([], [(s, cached, []) for s in pairs[0]])
        alone.run([], [(s, cached, []) for s in pairs[1]])
    together.run([], [(s, n, []) for s, n in zip(pairs[0], (100, 200), strict=True)])
    for s, n in zip(pairs[1], (100, 200), strict=True):
        alone.run([], [(s, n, [])])
    for mine, other in zip(*pairs, strict=True):
        for a, b in zip(together.tensors[:2], alone.tensors[:2], strict=True):
            close(a[:, mine.slot], b[:, other.slot])
        for seen, row_V in mine.logits.items():
            close(row_V, other.logits[seen])


@pytest.mark.parametrize("length", [1, 3])
def test_a_prompt_as_short_as_a_verification_is_a_prompt(model, length) -> None:
    """Beside sequences that verify two drafts each, three tokens a piece."""
    [ids_T, *others] = draw(length, 20, 30)
    batch = Batch(model)
    drafting = [batch.open(torch.cat([x, x])) for x in others]
    batch.run([], [(s, len(x), []) for s, x in zip(drafting, others, strict=True)])
    s = batch.open(ids_T)
    decode = [batch.decoding(d, length) for d in drafting]
    step = batch.pools.step(decode, [batch.chunk(s, length)], num_each=length, verify=True)
    fed = [d.ids_T[d.done : d.done + length] for d in drafting]
    with recorded() as calls, torch.inference_mode():
        logits_RV = model.verify(torch.cat([*fed, ids_T]), batch.pools, step).logits_RV
        want_TV = model(ids_T, Packing.of([length]))
    tokens = Counter((call.op, call.args[0].shape[0]) for call in calls)
    assert tokens["kda_step", 2 * length] > 0
    assert tokens["kda_chunk", length] == 2 * tokens["kda_step", 2 * length]  # the truth's own
    assert torch.equal(logits_RV[2 * length :], want_TV)
    alone = Batch(model)
    t = alone.open(ids_T)
    alone.run([], [(t, length, [])])
    assert same_states(batch, s.slot, alone, t.slot)


@pytest.mark.parametrize("form", ["decode", "prefill"])
def test_nan_stays_in_its_sequence_and_ends_with_it(model, form) -> None:
    """Nobody clears what is freed: a new sequence does not look at it."""
    texts = draw(40, 40, 40)
    sick, well = Batch(model), Batch(model)
    pairs = [[batch.open(ids_T) for ids_T in texts[:2]] for batch in (sick, well)]
    for batch, (a, b) in zip((sick, well), pairs, strict=True):
        batch.run([], [(a, 5, []), (b, 5, [])])
    (ill, neighbour), (_, other) = pairs
    sick.pools.state_LSHKV[:, ill.slot] = torch.nan
    sick.pools.window_LSWC[:, ill.slot] = torch.nan
    sick.pools.rows_LPBC[:, ill.pages] = torch.nan
    for batch, (a, b) in zip((sick, well), pairs, strict=True):
        if form == "decode":
            batch.run([a, b])
        else:
            batch.run([], [(a, 3, []), (b, 3, [])])
    assert torch.isnan(ill.logits[ill.done]).all()
    assert torch.equal(neighbour.logits[neighbour.done], other.logits[other.done])
    assert same_states(sick, neighbour.slot, well, other.slot)

    successor = sick.open(texts[2])
    successor.slot, successor.pages = ill.slot, ill.pages
    first = well.open(texts[2])
    for size in (1, 6):
        for batch, s in ((sick, successor), (well, first)):
            batch.run([], [(s, size, [])])
    for batch, s in ((sick, successor), (well, first)):
        batch.run([s])
    for seen, row_V in first.logits.items():
        assert torch.equal(successor.logits[seen], row_V)
    assert same_states(sick, successor.slot, well, first.slot)


def test_copies_of_one_call_do_not_see_each_other(model) -> None:
    pools = Pools.of(model.config, slots=6, pages=6, device=CPU, dtype=torch.float32)
    kinds = pools.state_LSHKV, pools.window_LSWC, pools.rows_LPBC
    for pairs in ([(0, 1), (1, 2)], [(1, 2), (0, 1)], [(2, 3), (3, 2)], [(4, 0), (4, 5)]):
        for pool in kinds:
            pool.normal_()
        before = [pool.clone() for pool in kinds]
        pools.copy_slots(pairs)
        pools.copy_pages(pairs)
        for pool, was in zip(kinds, before, strict=True):
            for source, target in pairs:
                was_there = was[:, source]
                assert torch.equal(pool[:, target], was_there)
            for place in {*range(6)} - {target for _, target in pairs}:
                assert torch.equal(pool[:, place], was[:, place])
    with pytest.raises(ValueError, match="two copies to one place"):
        pools.copy_slots([(0, 1), (2, 1)])


@pytest.mark.parametrize("rows", [1, 3])
def test_fixed_buffers_run_whatever_is_loaded_into_them(model, rows) -> None:
    """Sequences that have moved, grown, come and gone between two steps."""
    texts = draw(80, 80, 80)
    batch, fresh = Batch(model), Batch(model)
    pairs = [[b.open(ids_T) for ids_T in texts] for b in (batch, fresh)]
    for b, sequences in zip((batch, fresh), pairs, strict=True):
        b.run([], [(s, n, []) for s, n in zip(sequences, (60, 5, 63), strict=True)])
    fixed = batch.pools.step([], padded_to=rows, table_width=4)
    addresses = [x.data_ptr() for x in fixed.decode[:3]] + [fixed.row_T.data_ptr()]
    moved = [[0], [2], [1], [0, 2], [2, 1, 0], [1]]
    for order in [x for x in moved if len(x) <= rows]:
        mine, others = ([each[i] for i in order] for each in pairs)
        fixed.load(
            batch.pools.step([batch.decoding(s) for s in mine], padded_to=rows, table_width=4)
        )
        ids_T = torch.zeros(rows, dtype=torch.long)
        ids_T[: len(mine)] = torch.stack([s.ids_T[s.done] for s in mine])
        with torch.inference_mode():
            logits_RV = model.step(ids_T, batch.pools, fixed)
        fresh.run(others, padded_to=rows)
        for s, t, row_V in zip(mine, others, logits_RV, strict=False):
            s.done += 1
            assert torch.equal(row_V, t.logits[s.done])
            assert same_states(batch, s.slot, fresh, t.slot)
        # Whoever moves takes another slot, and NaN stays behind.
        for b, sequences in ((batch, mine), (fresh, others)):
            slot = b.free_slots.pop()
            b.pools.copy_slots([(sequences[0].slot, slot)])
            b.free_slots.insert(0, sequences[0].slot)
            b.pools.state_LSHKV[:, sequences[0].slot] = torch.nan
            sequences[0].slot = slot
    assert addresses == [x.data_ptr() for x in fixed.decode[:3]] + [fixed.row_T.data_ptr()]


def test_only_a_step_of_the_same_shape_is_loaded(model) -> None:
    batch = Batch(model)
    fixed = batch.pools.step([], padded_to=2, table_width=2)
    others = [
        batch.pools.step([], padded_to=3, table_width=2),
        batch.pools.step([], padded_to=2, table_width=3),
        batch.pools.step([], padded_to=2, table_width=2, num_each=2),
        batch.pools.step([], padded_to=2, table_width=2, verify=True),
        batch.pools.step([], [batch.chunk(batch.open(draw(2)[0]), 2)], padded_to=2, table_width=2),
    ]
    for other in others:
        with pytest.raises(ValueError, match="are unlike"):
            fixed.load(other)
    assert fixed.decode.slot_N.tolist() == [NO_SLOT] * 2


def test_a_sequence_beside_a_prefill_is_the_sequence_alone(model) -> None:
    """To the last bit, while the tokens are few enough for ops that are batch invariant."""
    texts = draw(30, 30, 30, 30)
    beside, alone = Batch(model), Batch(model)
    pairs = [[batch.open(ids_T) for ids_T in texts] for batch in (beside, alone)]
    for batch, (a, b, *_) in zip((beside, alone), pairs, strict=True):
        batch.run([], [(a, 4, []), (b, 4, [])])
    (a, b, c, d), (e, f, g, _) = pairs
    beside.run([a], [(b, 4, []), (c, 4, []), (d, 3, [])])
    alone.run([e])
    alone.run([], [(f, 4, [])])  # goes on from a state
    alone.run([], [(g, 4, [])])  # without one
    for mine, other in ((a, e), (b, f), (c, g)):
        assert same_states(beside, mine.slot, alone, other.slot)
        for seen, row_V in other.logits.items():
            assert torch.equal(mine.logits[seen], row_V)


def test_a_mixed_batch_is_split_and_each_part_takes_its_own_form(model) -> None:
    texts = draw(*(90,) * 6)
    mixed, split = Batch(model), Batch(model)
    pairs = [[batch.open(ids_T) for ids_T in texts] for batch in (mixed, split)]
    for batch, sequences in zip((mixed, split), pairs, strict=True):
        batch.run([], [(s, 9, []) for s in sequences[:4]])
    with recorded() as calls:
        mixed.run(pairs[0][:4], [(s, 70, []) for s in pairs[0][4:]])
    tokens = Counter((call.op, call.args[0].shape[0]) for call in calls)
    num_kda = mixed.pools.state_LSHKV.shape[0]
    num_mla = mixed.pools.rows_LPBC.shape[0]
    assert tokens["kda_step", 4] == tokens["kda_chunk", 140] == num_kda
    assert tokens["mla_decode", 4] == tokens["mla_prefill", 140] == num_mla
    assert {op for op, _ in tokens} >= {"kda_step", "kda_chunk"}
    split.run(pairs[1][:4])
    split.run([], [(s, 70, []) for s in pairs[1][4:]])
    for mine, other in zip(*pairs, strict=True):
        for a, b in zip(mixed.tensors[:2], split.tensors[:2], strict=True):
            close(a[:, mine.slot], b[:, other.slot])
        for seen, row_V in other.logits.items():
            close(mine.logits[seen], row_V)


def test_a_cut_prompt_is_computed_anew(model) -> None:
    """One token less has another state: it is not what a longer run left, whatever lies there."""
    [ids_T] = draw(20)
    batch, other = Batch(model), Batch(model)
    s, shorter = batch.open(ids_T), other.open(ids_T[:19])
    batch.run([], [(s, 20, [])])
    s.done, s.logits = 0, {}
    for pool in batch.tensors:
        pool.view(torch.int32).fill_(0x3E3E3E3E)  # plausible numbers
    batch.run([], [(s, 19, [])])
    other.run([], [(shorter, 19, [])])
    assert same_states(batch, s.slot, other, shorter.slot)
    assert torch.equal(s.logits[19], shorter.logits[19])


def test_a_decoding_step_has_no_prefill(model) -> None:
    batch = Batch(model)
    step = batch.pools.step([Decoding(0, [3], 1)])
    assert step.prefill == ()
    assert step.logit_R is None
