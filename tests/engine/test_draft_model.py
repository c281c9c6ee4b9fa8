from __future__ import annotations

from typing import Any

import pytest
import torch

from perilune.core.types import EngineInfo, SamplingParams, TokenRequest
from perilune.engine.admission import admit
from perilune.engine.core import EngineCore
from perilune.engine.draft_model import CATCH_UP, DraftModel
from perilune.engine.fake_model import FakeModel
from perilune.engine.fake_pools import FakePools
from perilune.engine.sequence import TokenSequence
from perilune.engine.speculation import FirstOf, LookupDrafter
from perilune.model.init import random_weights
from perilune.model.model import Transformer
from perilune.model.presets import preset

INFO = EngineInfo(model_id="", vocab_size=16, max_context=4096, eos_ids=frozenset({3}))


def sequence_of(prompt: list[int], max_tokens: int = 30, info: EngineInfo = INFO) -> TokenSequence:
    request = TokenRequest(
        request_id="r",
        prompt_ids=tuple(prompt),
        max_tokens=max_tokens,
        ignore_eos=True,
        sampling=SamplingParams(temperature=0),
    )
    return admit(request, info)


def drafter_of(model: FakeModel, pages: int = 40, sequences: int = 4) -> DraftModel:
    """Whose freed memory is poisoned."""
    drafter = DraftModel(model, pages=pages, sequences=sequences)
    pools = drafter._pools
    assert isinstance(pools, FakePools)
    drafter.pages.on_free = pools.poison_pages
    drafter.slots.on_free = pools.poison_slots
    return drafter


def run(core: EngineCore, sequences: list[TokenSequence]) -> int:
    """Steps."""
    for sequence in sequences:
        core.add(sequence)
    num_steps = 0
    while core.scheduler.has_work:
        core.step()
        num_steps += 1
    core.step()
    return num_steps


def test_drafts_are_what_the_model_would_say() -> None:
    model = FakeModel(16, page_len=4)
    drafter = drafter_of(model)
    one, other = sequence_of([1, 2, 4]), sequence_of([5] * 9)
    for _ in range(2):
        drafts = drafter.draft({one: 5, other: 2})
        for sequence, count in ((one, 5), (other, 2)):
            text = [*sequence.request.prompt_ids, *sequence.generated_ids]
            assert drafts[sequence] == model.continuation(text, count)
        one.append(drafts[one][0])
        one.append(9)
        other.append(drafts[other][0])


def test_an_engine_with_itself_as_the_draft_takes_everything() -> None:
    model = FakeModel(16)
    drafter = drafter_of(FakeModel(16))
    sequences = [sequence_of([1, 2]), sequence_of([4])]
    core = EngineCore(model, drafter=drafter)
    num_steps = run(core, sequences)
    assert [s.generated_ids for s in sequences] == [
        model.continuation(p, 30) for p in ([1, 2], [4])
    ]
    stats = core.stats()
    assert stats.accepted_tokens_total == stats.drafted_tokens_total > 40
    assert num_steps < 8
    assert drafter.pages.num_used == drafter.slots.num_used == 0


def test_another_model_changes_no_token() -> None:
    class Other(FakeModel):
        def logits(self, ids: Any) -> torch.Tensor:
            return super().logits([*ids, 0] if len(ids) % 3 == 0 else ids)

    model, sequences = FakeModel(16), [sequence_of([1, 2]), sequence_of([4])]
    core = EngineCore(model, drafter=FirstOf(LookupDrafter(), drafter_of(Other(16))))
    run(core, sequences)
    assert sequences[0].generated_ids == model.continuation([1, 2], 30)
    assert sequences[1].generated_ids == model.continuation([4], 30)
    stats = core.stats()
    assert 0 < stats.accepted_tokens_total < stats.drafted_tokens_total


def test_a_long_text_is_read_in_parts_and_short_ones_do_not_wait_for_it() -> None:
    model = FakeModel(16)
    drafter = drafter_of(model)
    long, short = sequence_of([7] * (CATCH_UP + 100)), sequence_of([1, 2])
    assert drafter.draft({long: 2, short: 2}).keys() == {short}
    assert drafter.draft({long: 2}).keys() == {long}
    assert [sum(call) for call in model.calls if max(call) > 1] == [CATCH_UP, 102]


def test_without_memory_there_is_no_draft() -> None:
    drafter = drafter_of(FakeModel(16, page_len=4), pages=4, sequences=1)
    one, other = sequence_of([1, 2]), sequence_of([1, 2])
    assert drafter.draft({one: 3, other: 3}).keys() == {one}
    assert drafter.draft({sequence_of([1] * 12): 1}) == {}
    drafter.forget(one)
    drafter.forget(one)
    assert drafter.draft({other: 3}).keys() == {other}


@pytest.mark.parametrize("name", ["tiny-k3", "tiny-kimi-linear"])
def test_a_tiny_model_drafts_for_itself(name: str) -> None:
    generator = torch.Generator().manual_seed(5)
    model = random_weights(Transformer(preset(name)), generator).double()
    info = EngineInfo(
        model_id="", vocab_size=model.config.vocab_size, max_context=4096, eos_ids=frozenset()
    )
    plain = sequence_of([1, 2, 3, 4, 5], info=info)
    run(EngineCore(model), [plain])
    drafted = sequence_of([1, 2, 3, 4, 5], info=info)
    core = EngineCore(model, drafter=DraftModel(model, pages=5, sequences=2))
    run(core, [drafted])
    assert drafted.generated_ids == plain.generated_ids
    stats = core.stats()
    assert stats.accepted_tokens_total == stats.drafted_tokens_total > 20
