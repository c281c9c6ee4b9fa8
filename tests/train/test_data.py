"""PackedLoader: every token once an epoch, shares by weight, exact resume."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.core.errors import ConfigError
from perilune.train.archives import sha256
from perilune.train.data import IGNORED, PackedLoader, cut_pieces
from perilune.train.prefetch import Prefetcher
from perilune.train.shards import (
    Shard,
    check_files,
    fingerprint,
    join,
    load_shard,
    save_shard,
)

PAD = 65_000


def make_shard(lens, first_id=0):
    """Document d holds consecutive ids, all different over the shard."""
    documents, position = [], first_id
    for length in lens:
        documents.append(np.arange(position, position + length, dtype=np.uint16))
        position += length
    return join(documents)


def loader(shards, weights, **settings):
    options = {"batch_rows": 4, "row_len": 64, "pad_id": PAD, "seed": 3} | settings
    return PackedLoader(shards, weights, **options)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(1, 16), st.booleans())
@settings(max_examples=60, deadline=None)
def test_pieces_cover_every_document_exactly_once(lens, row_len, is_random):
    shard = make_shard(lens)
    rng = np.random.default_rng(0) if is_random else None
    table = cut_pieces(shard.offsets, row_len, rng)
    covered = [i for a, b in zip(table.starts, table.stops, strict=True) for i in range(a, b)]
    assert covered == list(range(sum(lens)))
    assert (table.stops - table.starts).max() <= row_len
    assert table.is_ends.sum() == len(lens)
    for start, stop in zip(table.starts, table.stops, strict=True):
        assert np.searchsorted(shard.offsets, start, "right") == np.searchsorted(
            shard.offsets, stop - 1, "right"
        )


def test_targets_are_the_next_token_of_the_same_document():
    shard = make_shard([10, 200, 3, 64, 65, 1])
    last_ids = set(shard.tokens[shard.offsets[1:] - 1].tolist())
    for _, batch in zip(range(5), loader({"a": shard}, {"a": 1.0}), strict=False):
        real_BL = batch.inputs_BL != PAD
        has_target_BL = batch.targets_BL != IGNORED
        assert (batch.targets_BL == batch.inputs_BL + 1)[has_target_BL].all()
        without = set(batch.inputs_BL[real_BL & ~has_target_BL].tolist())
        assert without <= last_ids
        assert not (has_target_BL & ~real_BL).any()


def test_segments_change_exactly_where_a_piece_starts():
    batch = next(loader({"a": make_shard([7] * 50)}, {"a": 1.0}))
    jumps_BL = np.diff(batch.inputs_BL, axis=1) != 1
    inside_BL = np.diff(batch.segments_BL, axis=1) == 0
    padding_BL = (batch.inputs_BL == PAD)[:, 1:]
    assert not (jumps_BL & inside_BL & ~padding_BL).any()


def test_no_token_is_shown_much_more_often_than_another():
    shard = make_shard([5, 9, 130, 64, 2] * 6)
    packed = loader({"a": shard}, {"a": 1.0}, batch_rows=1)
    seen = np.zeros(len(shard.tokens), int)
    for _ in range(400):
        batch = next(packed)
        ids = batch.inputs_BL[batch.inputs_BL != PAD]
        np.add.at(seen, ids, 1)
    num_full_pieces_per_epoch = 18
    assert seen.max() - seen.min() <= 1 + -(-512 // num_full_pieces_per_epoch)
    assert seen.min() > 0


def test_rows_are_nearly_full():
    rng = np.random.default_rng(1)
    shard = make_shard(rng.integers(5, 150, size=600))
    batches = [next(packed) for packed in [loader({"a": shard}, {"a": 1.0}, row_len=256)] * 20]
    padding = np.mean([(batch.inputs_BL == PAD).mean() for batch in batches])
    assert padding < 0.01


def test_shares_follow_the_weights():
    shards = {"a": make_shard([30] * 100), "b": make_shard([8] * 500, first_id=10_000)}
    packed = loader(shards, {"a": 3.0, "b": 1.0}, row_len=128)
    batches = [next(packed) for _ in range(60)]
    from_a = sum(((b.inputs_BL < 10_000) & (b.inputs_BL != PAD)).sum() for b in batches)
    from_b = sum(((b.inputs_BL >= 10_000) & (b.inputs_BL != PAD)).sum() for b in batches)
    assert from_a / (from_a + from_b) == pytest.approx(0.75, abs=0.02)


def test_resume_continues_with_the_same_batches():
    shards = {"a": make_shard([30, 300, 7] * 20), "b": make_shard([8] * 90, first_id=20_000)}
    first = loader(shards, {"a": 1.0, "b": 1.0})
    for _ in range(17):
        next(first)
    cursor = json.loads(json.dumps(first.state_dict()))
    second = loader(shards, {"a": 1.0, "b": 1.0})
    second.load_state_dict(cursor)
    for _ in range(30):
        for one, two in zip(next(first), next(second), strict=True):
            assert np.array_equal(one, two)
    assert first.state_dict() == second.state_dict()
    assert first.epochs(first.state_dict())["b"] > 1


def test_seeds_differ_and_repeat():
    shards = {"a": make_shard([30] * 100)}
    one, again, other = (next(loader(shards, {"a": 1.0}, seed=s)).inputs_BL for s in (1, 1, 2))
    assert np.array_equal(one, again)
    assert not np.array_equal(one, other)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"b": 1.0}, "'b'"),
        ({"a": -1.0}, "negative"),
        ({"a": 0.0}, "zero"),
        ({"empty": 1.0}, "empty"),
    ],
)
def test_a_wrong_mixture_is_refused(weights, message):
    shards = {"a": make_shard([4]), "empty": make_shard([])}
    with pytest.raises(ConfigError, match=message):
        loader(shards, weights)


def test_a_cursor_of_other_shards_is_refused():
    cursor = loader({"a": make_shard([4])}, {"a": 1.0}).state_dict()
    with pytest.raises(ConfigError, match="cursor"):
        loader({"b": make_shard([4])}, {"b": 1.0}).load_state_dict(cursor)


@given(st.lists(st.integers(0, 30), max_size=12))
@settings(max_examples=25, deadline=None)
def test_shards_come_back_from_disk(tmp_path_factory, lens):
    folder = tmp_path_factory.mktemp("shard")
    shard = make_shard(lens)
    save_shard(folder, "train_a", shard)
    for one, two in zip(shard, load_shard(folder, "train_a"), strict=True):
        assert np.array_equal(one, two)


def test_a_shard_goes_on_in_more_files_and_is_one_again(tmp_path):
    shard = make_shard([30, 5, 64, 1, 300, 7] * 5)
    files = save_shard(tmp_path, "train_a", shard, max_tokens=100)
    assert len(files) > 20
    assert max(path.stat().st_size for path in files) == 2 * 300  # no document is cut
    loaded = load_shard(tmp_path, "train_a")
    assert np.array_equal(loaded.offsets, shard.offsets)
    assert len(loaded.tokens) == len(shard.tokens)
    one, two = (loader({"a": each}, {"a": 1.0}) for each in (shard, loaded))
    for _ in range(20):
        assert all(map(np.array_equal, next(one), next(two)))


def test_ids_above_65535_come_back(tmp_path):
    shard = join([np.array([1, 163_839], np.uint32), np.array([70_000], np.uint32)])
    save_shard(tmp_path, "train_a", shard)
    loaded = load_shard(tmp_path, "train_a")
    assert loaded.tokens[0:3].tolist() == [1, 163_839, 70_000]
    batch = next(loader({"a": loaded}, {"a": 1.0}))
    assert 163_839 in batch.inputs_BL


@pytest.fixture
def described(tmp_path):
    """A folder with a shard and its checksums."""
    files = save_shard(tmp_path, "train_a", make_shard([30, 300, 7]))
    entry = {"files": {path.name: sha256(path) for path in files}}
    (tmp_path / "manifest.json").write_text(json.dumps({"shards": {"train_a": entry}}))
    return tmp_path


def test_a_changed_byte_is_found(described):
    check_files(described, ["train_a"])
    before = fingerprint(described)
    path = described / "train_a.bin"
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    load_shard(described, "train_a")
    with pytest.raises(ConfigError, match=r"train_a\.bin is not the file that manifest\.json"):
        check_files(described, ["train_a"])
    assert fingerprint(described) == before
    path.unlink()
    with pytest.raises(ConfigError, match=r"train_a\.bin is missing"):
        check_files(described, ["train_a"])
    with pytest.raises(ConfigError, match="does not know the shard train_b"):
        check_files(described, ["train_b"])


def test_files_that_do_not_belong_together_are_refused(tmp_path):
    save_shard(tmp_path, "train_a", make_shard([4, 5]))
    (tmp_path / "train_a.bin").write_bytes(b"\0\0")
    with pytest.raises(ConfigError, match="belong together"):
        load_shard(tmp_path, "train_a")
    with pytest.raises(ConfigError, match="missing"):
        load_shard(tmp_path, "train_b")


def test_shard_type_counts_documents():
    assert isinstance(make_shard([1, 2]), Shard)
    assert make_shard([1, 2]).num_documents == 2


def test_prefetching_changes_nothing():
    shards = {"a": make_shard([30, 300, 7] * 20)}
    plain = loader(shards, {"a": 1.0})
    with Prefetcher(loader(shards, {"a": 1.0}), depth=3) as ahead:
        for _ in range(9):
            assert np.array_equal(next(plain).inputs_BL, next(ahead).inputs_BL)
        assert ahead.state_dict() == plain.state_dict()


def test_an_error_of_the_loader_reaches_the_reader():
    broken = loader({"a": make_shard([30] * 9)}, {"a": 1.0})
    broken._streams["a"].shard = None
    broken._shards["a"] = None
    with Prefetcher(broken) as ahead, pytest.raises(AttributeError):
        next(ahead)
