"""Any schedule over pools leaves what one forward pass would: logits, states, windows, rows."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pooled_batch import CLOSE, CPU, Batch, Held, Truth, close

from perilune.model import mla
from perilune.model.init import random_weights
from perilune.model.model import Transformer
from perilune.model.parse_config import parse_config
from perilune.model.pools import Pools
from perilune.model.presets import tiny_k3, tiny_kimi_linear
from perilune.model.step import PAGE, Cut, Decoding

TOKENS = 2 * PAGE + 12


def make_model(raw: dict) -> Transformer:
    model = random_weights(Transformer(parse_config(raw)), torch.Generator().manual_seed(6))
    # Rounded as in a checkpoint: few tokens then run on weights held as bf16.
    return model.bfloat16().float().freeze()


MODELS = {
    "k3": make_model(tiny_k3(hidden_size=40, num_hidden_layers=5)),
    "kimi_linear": make_model(tiny_kimi_linear(hidden_size=40, num_hidden_layers=4)),
}
TEXTS = torch.randint(0, 128, (3, TOKENS), generator=torch.Generator().manual_seed(8))
TRUTHS = {name: [Truth(model, ids) for ids in TEXTS] for name, model in MODELS.items()}
SIZES = (1, 2, 3, 5, 31, 32, 33, PAGE - 1, PAGE, PAGE + 1)


@pytest.fixture(params=MODELS)
def name(request) -> str:
    return request.param


@settings(max_examples=25)
@given(data=st.data(), name=st.sampled_from(sorted(MODELS)))
def test_any_schedule(data: st.DataObject, name: str) -> None:
    """Chunks of any size beside sequences that decode, states cut out on the way; sequences that
    go on from checkpoints, and new ones in freed memory."""
    batch = Batch(MODELS[name])
    running: dict[Held, int] = {}
    for _ in range(data.draw(st.integers(3, 7))):
        if len(running) < 3:
            text = data.draw(st.integers(0, len(TEXTS) - 1))
            running[batch.open(TEXTS[text])] = text
        decode: list[Held] = []
        chunks: list[tuple[Held, int, list[Cut]]] = []
        for s in running:
            what = data.draw(st.sampled_from(["decode", "prefill", "wait"]))
            if what == "decode" and 0 < s.done < TOKENS:
                decode.append(s)
            elif what == "prefill" and s.done < TOKENS:
                n = min(TOKENS - s.done, data.draw(st.sampled_from(SIZES)))
                after = sorted(data.draw(st.sets(st.integers(1, n), max_size=2)))
                chunks.append((s, n, [Cut(at, batch.free_slots.pop()) for at in after]))
        before = {s: s.done for s in running}
        if decode or chunks:
            batch.run(decode, chunks, padded_to=data.draw(st.integers(0, 4)))
        for s, _, cuts in chunks:
            for cut in cuts:
                batch.check_slot(cut.slot, before[s] + cut.after, TRUTHS[name][running[s]])
        for s, text in running.items():
            batch.check(s, TRUTHS[name][text])
        batch.check_untouched([*running])
        for cut in [cut for _, _, cuts in chunks for cut in cuts]:
            batch.free_slot(cut.slot)
        if len(running) == 3:
            oldest = next(iter(running))
            del running[oldest]
            batch.free(oldest)


def test_a_checkpoint_goes_on_as_its_sequence_did(name: str) -> None:
    """Pages shared and the last one copied, at every place of a page; both go on apart."""
    model, truth = MODELS[name], TRUTHS[name][0]
    for tokens in (1, 2, PAGE - 1, PAGE, PAGE + 3):
        joined = torch.cat([TEXTS[0][:tokens], TEXTS[1][: TOKENS - tokens]])
        truth_of_child = Truth(model, joined)
        batch = Batch(model)
        parent, kept = batch.open(TEXTS[0]), batch.free_slots.pop()
        batch.run([], [(parent, PAGE + 5, [Cut(tokens, kept)])])
        child = batch.fork(kept, parent, tokens, joined)
        batch.run([parent], [(child, 40, [])])
        batch.run([child, parent])
        batch.check(parent, truth)
        batch.check(child, truth_of_child)
        batch.check_slot(kept, tokens, truth)
        batch.check_untouched([parent, child])


@pytest.mark.parametrize("cached", [0, 1, 2, 40])
def test_a_cut_is_the_state_of_a_run_that_stops_there(name: str, cached: int) -> None:
    """To the last bit, while the tokens are few enough for ops that are batch invariant."""
    after = (1, 2, 3, 4, 9)
    batch = Batch(MODELS[name])
    through, stops = batch.open(TEXTS[0]), batch.open(TEXTS[0])
    cuts = [Cut(at, batch.free_slots.pop()) for at in after]
    if cached:
        batch.run([], [(through, cached, []), (stops, cached, [])])
    batch.run([], [(through, 12, cuts)])
    for begin, end, cut in zip((0, *after), after, cuts, strict=False):
        batch.run([], [(stops, end - begin, [])])
        for pool in batch.tensors[:2]:
            assert torch.equal(pool[:, cut.slot], pool[:, stops.slot])


def test_a_cut_at_the_end_is_the_state_itself(name: str) -> None:
    batch = Batch(MODELS[name])
    s, kept = batch.open(TEXTS[0]), batch.free_slots.pop()
    batch.run([], [(s, 35, [Cut(35, kept)])])
    for pool in batch.tensors[:2]:
        assert torch.equal(pool[:, kept], pool[:, s.slot])


def test_many_keys_and_values_come_in_groups_of_heads(name: str, monkeypatch) -> None:
    monkeypatch.setattr(mla, "EXPANDED", 1)
    batch = Batch(MODELS[name])
    s = batch.open(TEXTS[0])
    batch.run([], [(s, 70, [])])
    batch.run([], [(s, 40, [])])
    batch.check(s, TRUTHS[name][0])


def test_padded_rows_are_inert(name: str) -> None:
    """Their latents go to the first row of page 0."""
    alone, padded = Batch(MODELS[name]), Batch(MODELS[name])
    for batch, options in ((alone, {}), (padded, {"padded_to": 6, "table_width": 5})):
        s = batch.open(TEXTS[0])
        batch.run([], [(s, 64, [])])
        for _ in range(3):
            batch.run([s], **options)
        batch.check(s, TRUTHS[name][0])
        batch.check_untouched([s])
    assert torch.isfinite(padded.pools.rows_LPBC[:, 0, 0]).all()
    for own, other in zip(alone.tensors[:2], padded.tensors[:2], strict=True):
        assert torch.equal(own[:, s.slot], other[:, s.slot])


def test_several_tokens_at_once_are_as_many_steps(name: str) -> None:
    batch, num_each = Batch(MODELS[name]), 3
    sequences = [batch.open(ids) for ids in TEXTS]
    batch.run([], [(s, n, []) for s, n in zip(sequences, (1, 40, PAGE - 1), strict=True)])
    step = batch.pools.step([batch.decoding(s, num_each) for s in sequences], num_each=num_each)
    ids_T = torch.cat([s.ids_T[s.done : s.done + num_each] for s in sequences])
    with torch.inference_mode():
        logits_RV = batch.model.step(ids_T, batch.pools, step)
    for s, rows in zip(sequences, logits_RV.split(num_each), strict=True):
        s.logits |= {s.done + i + 1: row for i, row in enumerate(rows)}
        s.done += num_each
    for s, truth in zip(sequences, TRUTHS[name], strict=True):
        batch.check(s, truth)


@pytest.mark.parametrize("accepted", [(0, 1, 4), (4, 4, 0), (2, 3, 1)])
def test_drafts_that_are_not_accepted_leave_no_trace(name: str, accepted: Sequence[int]) -> None:
    """For every count, in one batch: what follows is what follows the accepted tokens alone."""
    batch, num_each = Batch(MODELS[name]), 4
    sequences = [batch.open(ids) for ids in TEXTS]
    batch.run([], [(s, n, []) for s, n in zip(sequences, (3, 40, PAGE - 2), strict=True)])
    before = [x.clone() for x in batch.tensors[:2]]
    fed = [batch.decoding(s, num_each) for s in sequences]
    step = batch.pools.step(fed, num_each=num_each, verify=True)
    drafts = [
        torch.cat([s.ids_T[s.done : s.done + n], torch.randint(0, 128, (num_each - n,))])
        for s, n in zip(sequences, accepted, strict=True)
    ]
    with torch.inference_mode():
        verified = batch.model.verify(torch.cat(drafts), batch.pools, step)
        for pool, was in zip(batch.tensors[:2], before, strict=True):
            assert torch.equal(pool.nan_to_num(7e7), was.nan_to_num(7e7))
        batch.model.accept(verified, batch.pools, step, torch.tensor(accepted))
    parts = zip(sequences, accepted, verified.logits_RV.split(num_each), TRUTHS[name], strict=True)
    for s, n, logits, truth in parts:
        s.logits |= {s.done + i + 1: logits[i] for i in range(n)}
        s.done += n
        batch.check(s, truth)
    batch.run(sequences)
    batch.run([], [(s, 3, []) for s in sequences])
    for s, truth in zip(sequences, TRUTHS[name], strict=True):
        batch.check(s, truth)


def test_states_in_bf16_drift_by_their_rounding(name: str) -> None:
    """Only states are rounded, whenever they are kept; everything else stays as wide."""
    exact, narrow = Batch(MODELS[name]), Batch(MODELS[name], state_dtype=torch.bfloat16)
    for batch in (exact, narrow):
        s, kept = batch.open(TEXTS[0]), batch.free_slots.pop()
        batch.run([], [(s, 40, [Cut(20, kept)])])
        for _ in range(4):
            batch.run([s])
        batch.run([], [(s, 20, [])])
    assert narrow.pools.state_LSHKV.dtype == torch.bfloat16
    assert narrow.pools.window_LSWC.dtype == narrow.pools.rows_LPBC.dtype == torch.float32
    batch.check(s, TRUTHS[name][0], bound=0.05)
    first = exact.pools.state_LSHKV[0, kept], narrow.pools.state_LSHKV[0, kept]
    assert torch.equal(first[0].bfloat16(), first[1])
    with pytest.raises(AssertionError):
        batch.check(s, TRUTHS[name][0], bound=CLOSE)


def test_sizes_are_those_of_the_tensors(name: str) -> None:
    config = MODELS[name].config
    pools = Pools.of(config, slots=5, pages=7, device=CPU, dtype=torch.bfloat16)
    assert pools.state_LSHKV.dtype == torch.float32
    assert pools.window_LSWC.dtype == pools.rows_LPBC.dtype == torch.bfloat16
    assert pools.nbytes == sum(x.nbytes for pool in pools.layers for x in pool)
    assert pools.nbytes == 5 * pools.slot_nbytes + 7 * pools.page_nbytes
    wide = Pools.of(config, slots=1, pages=1, device=CPU, dtype=torch.float64)
    assert wide.state_LSHKV.dtype == torch.float64


def test_no_logits_are_computed_that_nobody_wants(name: str) -> None:
    batch = Batch(MODELS[name])
    a, b, c = (batch.open(ids) for ids in TEXTS)
    batch.run([], [(c, 9, [])])
    chunks = [batch.chunk(a, 7), batch.chunk(b, 20)]
    step = batch.pools.step(
        [batch.decoding(c)], [chunks[0]._replace(num_logits=0), chunks[1]._replace(num_logits=2)]
    )
    ids_T = torch.cat([TEXTS[2][9:10], TEXTS[0][:7], TEXTS[1][:20]])
    with torch.inference_mode():
        logits_RV = batch.model.step(ids_T, batch.pools, step)
        none = batch.pools.step([], [batch.chunk(Held(TEXTS[0], 0, [1]), 3)._replace(num_logits=0)])
        assert batch.model.step(ids_T[:3], batch.pools, none).shape == (0, 128)
    truths = TRUTHS[name]
    want = [truths[2].logits_TV[9:10], truths[1].logits_TV[18:20]]
    close(logits_RV, torch.cat(want))


def test_a_step_is_fed_as_many_tokens_as_it_has() -> None:
    model = MODELS["k3"]
    pools = Pools.of(model.config, slots=1, pages=2, device=CPU, dtype=torch.float32)
    step = pools.step([Decoding(0, [1], 1)])
    with pytest.raises(AssertionError):
        model.step(torch.tensor([1, 2]), pools, step)
