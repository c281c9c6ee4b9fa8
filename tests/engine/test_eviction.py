"""What is given up first, and what a prefix is worth."""

from __future__ import annotations

import numpy as np
import pytest

from perilune.engine.chances import Chances
from perilune.engine.cost_model import CostModel
from perilune.engine.eviction import Scores, Victims
from perilune.engine.pages import PagePool
from perilune.engine.prefix_cache import PrefixCache
from perilune.engine.radix_tree import Node
from perilune.engine.slots import SlotPool
from perilune.model.presets import preset
from perilune.model.sizes import cache_sizes, count_parameters

COST = CostModel(token_flops=10.0, pair_flops=0.0, row_bytes=1, state_bytes=100)


def node(num_tokens: int, used: float = 0.0, parent: Node | None = None, **fields) -> Node:
    root = Node(np.empty(0, np.int32), 0, None)
    parent = parent or root
    fields = {"slot": 1, "state_used": used, "rows_used": used, **fields}
    return Node(np.zeros(num_tokens, np.int32), parent.end, parent, **fields)


def scores(alpha: float, chances: Chances | None = None) -> Scores:
    return Scores(COST, chances or Chances(), alpha=alpha, page_len=4)


@pytest.mark.parametrize("name", ["nano", "kimi-k3", "kimi-linear-48b-a3b"])
def test_costs_come_from_the_models_sizes(name):
    config = preset(name)
    cost, sizes = CostModel.of(config), cache_sizes(config, 1)
    assert cost.row_bytes == sizes.latent_per_token
    assert cost.state_bytes == sizes.kda_state + sizes.conv_taps
    linear = 2 * count_parameters(config).activated
    assert linear < cost.token_flops < 1.3 * linear
    assert CostModel.of(config, state_bytes=2).state_bytes == sizes.kda_state // 2 + sizes.conv_taps


def test_attention_makes_later_tokens_dearer():
    cost = CostModel(token_flops=1.0, pair_flops=1.0, row_bytes=1, state_bytes=1)
    pairs = sum(range(10, 20)) + 10 / 2  # a token and half of itself, by the integral
    assert cost.flops(10, 20) == 10 + pairs
    assert cost.flops(0, 10) + cost.flops(10, 20) == cost.flops(0, 20)


def test_of_equal_worth_the_older_goes_first():
    assert scores(1.0).of_state(node(50, 1.0)) < scores(1.0).of_state(node(50, 2.0))


def test_of_equal_age_what_saves_less_goes_first():
    assert scores(1.0).of_state(node(50)) < scores(1.0).of_state(node(60))
    assert scores(0.0).of_state(node(50)) == scores(0.0).of_state(node(60))


def test_a_state_saves_what_lies_behind_the_one_before():
    before = node(90)
    assert scores(1.0).of_state(node(50, parent=before)) == scores(1.0).of_state(node(50))
    before.slot = None
    assert scores(1.0).of_state(node(50, parent=before)) == scores(1.0).of_state(node(140))


def test_the_rows_of_a_leaf_weigh_as_well():
    with_rows, without = node(50, pages=[1] * 13), node(50)
    assert scores(1.0).of_leaf(with_rows) < scores(1.0).of_leaf(without)


def test_alpha_trades_turnovers_for_a_factor_in_expected_savings():
    old, young = node(100, 0.0), node(25, 0.5)
    assert scores(0.3).of_state(old) < scores(0.3).of_state(young)
    assert scores(0.5).of_state(old) > scores(0.5).of_state(young)


def test_what_nobody_comes_back_to_goes_first():
    chances = Chances()
    for _ in range(20):
        chances.note_kept("end")
        chances.note_kept("mark")
        chances.note_hit("mark", 0)
    assert chances.of("end", 0) < chances.of("branch", 0) == 0.25 < chances.of("mark", 0)
    of_state = scores(1.0, chances).of_state
    assert of_state(node(50, reason="end")) < of_state(node(50, reason="mark"))


def test_states_that_were_hit_are_a_class_of_their_own():
    chances = Chances()
    for _ in range(20):
        chances.note_kept("end")
        chances.note_hit("end", 0)
    assert chances.of("end", 0) > 0.8
    assert chances.of("end", 1) < 0.1
    assert chances.of("end", 2) == chances.of("mark", 7) == 0.25


def test_victims_come_by_score_and_the_ones_that_are_not_free_stay():
    order = {name: node(10, used) for name, used in (("c", 3.0), ("a", 1.0), ("b", 2.0))}
    victims = Victims(lambda n: n.state_used, lambda n: n.slot is not None)
    for each in order.values():
        victims.offer(each)
    assert next(victims.take(lambda n: n is not order["a"])) is order["b"]
    assert list(victims.take(lambda n: True)) == [order["a"], order["c"]]
    assert list(victims.take(lambda n: True)) == []


def test_a_victim_that_was_used_since_waits_for_its_turn():
    first, second = node(10, 1.0), node(10, 2.0)
    victims = Victims(lambda n: n.state_used, lambda n: n.slot is not None)
    victims.offer(first)
    victims.offer(second)
    first.state_used = 3.0
    assert list(victims.take(lambda n: True)) == [second, first]


def test_a_victim_whose_score_has_fallen_is_offered_again():
    first, second = node(10, 1.0), node(10, 2.0)
    victims = Victims(lambda n: n.state_used, lambda n: n.slot is not None)
    victims.offer(first)
    victims.offer(second)
    second.state_used = 0.5
    victims.offer(second)
    assert list(victims.take(lambda n: True)) == [second, first]


def test_what_is_gone_does_not_pile_up():
    """Only slots run out here: nobody ever asks for a leaf."""
    pages, slots = PagePool(4096), SlotPool(8)
    cache = PrefixCache(pages, slots, page_len=4, cost=COST)
    for start in range(0, 20_000, 20):
        cache.make_room(0, 1)
        table = pages.allocate(2)
        cache.publish([*range(start, start + 8)], 8, table, slots.allocate(1)[0])
        pages.release(table)
    kept = [victims._heap for victims in (cache._reclaimer._leaves, cache._reclaimer._states)]
    assert all(len(heap) < 200 for heap in kept)
    assert slots.num_used == 8
