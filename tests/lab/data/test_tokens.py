"""Token shards and windows: the format, its faults, and batches as a function of seed and position."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from polarstep_lab.data import shards
from polarstep_lab.data.shards import (
    MAGIC,
    ShardError,
    digest_of,
    find_shards,
    open_shard,
    write_shard,
)
from polarstep_lab.data.tokens import TokenWindows, halves


def header(magic: int = MAGIC, version: int = 1, count: int = 10) -> bytes:
    values = np.zeros(256, dtype="<i4")
    values[:3] = magic, version, count
    return values.tobytes()


def test_a_shard_is_256_int32_then_uint16(tmp_path):
    tokens = np.array([0, 50256, 65535, 7], dtype=np.uint16)
    write_shard(tmp_path / "a.bin", tokens)
    raw = (tmp_path / "a.bin").read_bytes()
    assert np.frombuffer(raw[:1024], "<i4")[:4].tolist() == [20240520, 1, 4, 0]
    assert np.frombuffer(raw[1024:], "<u2").tolist() == tokens.tolist()
    assert open_shard(tmp_path / "a.bin").tolist() == tokens.tolist()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"is empty \(0 bytes\)"),
        (b"short", r"has 5 bytes, less than the header of 1024"),
        (header(magic=278895051) + bytes(20), r"starts with 278895051, not with the magic number"),
        (header(version=2) + bytes(20), r"has version 2, expected 1: make it anew"),
        (header(count=0), r"promises 0 tokens, expected 1 or more"),
        (header(count=-3), r"promises -3 tokens"),
        (header() + bytes(19), r"is truncated: its header promises 10 tokens, 1,044 bytes"),
        (header() + bytes(22), r"is too long"),
    ],
)
def test_damaged_shards_are_named(content, message, tmp_path):
    path = tmp_path / "bad.bin"
    path.write_bytes(content)
    with pytest.raises(ShardError, match=message) as caught:
        open_shard(path)
    assert str(path) in str(caught.value)


def test_missing_shards_say_where_they_were_looked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ShardError, match=r"no token shard matches 'nowhere/\*\.bin' \(looked from"):
        find_shards("nowhere/*.bin")
    with pytest.raises(ShardError, match="does not exist"):
        open_shard(tmp_path / "nothing.bin")


def test_globbing_several_patterns_gives_each_shard_once_in_order(tmp_path):
    for name in ("b_train_2.bin", "b_train_1.bin", "a_train_1.bin", "b_val_0.bin"):
        write_shard(tmp_path / name, np.arange(3, dtype=np.uint16))
    found = find_shards([f"{tmp_path}/b_train_*.bin", f"{tmp_path}/*_train_*.bin"])
    assert [path.name for path in found] == ["a_train_1.bin", "b_train_1.bin", "b_train_2.bin"]


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([70000], "a.bin run from 70000 to 70000, .*: take a smaller vocabulary"),
        ([-1], "a.bin run from -1 to -1, and a shard holds 0 to 65535"),
        ([], r"a.bin have shape \(0,\): expected a vector with at least one entry"),
    ],
)
def test_tokens_that_do_not_fit_are_refused(tokens, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        write_shard(tmp_path / "a.bin", np.array(tokens, dtype=int))
    assert not list(tmp_path.iterdir())


def windows(*sizes: int, length: int = 8, vocab: int = 60_000) -> TokenWindows:
    """Shards in which every token is shard number · 10,000 + position."""
    shards = tuple(
        (10_000 * number + np.arange(size)).astype(np.uint16) for number, size in enumerate(sizes)
    )
    return TokenWindows(shards, length, vocab)


def test_targets_are_the_next_tokens():
    inputs, targets = windows(100, 50).train(seed=3, position=0, count=12)
    assert inputs.shape == targets.shape == (12, 8)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(targets, inputs + 1)


@pytest.mark.parametrize("epoch", [0, 1, 5])
def test_an_epoch_sees_every_window_once(epoch):
    data = windows(100, 3, 57)
    assert data.count == 99 // 8 + 0 + 56 // 8
    inputs, _ = data.train(seed=0, position=epoch * data.count, count=data.count)
    places = inputs.flatten().tolist()
    assert len(set(places)) == len(places) == data.count * 8
    assert {place // 10_000 for place in places} == {0, 2}


def test_batches_are_a_function_of_seed_and_position_alone():
    data = windows(500, 300)
    whole, _ = data.train(seed=1, position=0, count=2 * data.count)
    parts = [data.train(seed=1, position=p, count=5)[0] for p in range(0, 2 * data.count - 4, 5)]
    assert torch.equal(torch.cat(parts), whole[: 5 * len(parts)])
    again = windows(500, 300).train(seed=1, position=11, count=7)[0]
    assert torch.equal(again, whole[11:18])
    assert not torch.equal(windows(500, 300).train(seed=2, position=11, count=7)[0], again)


def test_epochs_are_shuffled_anew_and_cut_at_other_places():
    data = windows(1005, length=100)
    starts = [data.train(0, epoch * 10, 10)[0][:, 0].tolist() for epoch in range(12)]
    assert len({tuple(start) for start in starts}) == 12
    assert len({min(start) for start in starts}) > 1
    assert max(max(start) for start in starts) + 100 < 1005


def test_validation_windows_are_in_file_order():
    inputs, targets = windows(20, 9, 30).in_order(1, 4)
    assert inputs[:, 0].tolist() == [8, 10_000, 20_000, 20_008]
    assert torch.equal(targets, inputs + 1)


def test_a_token_beyond_the_vocabulary_is_named():
    with pytest.raises(ShardError, match=r"token \d+, but the model has a vocabulary of 5"):
        windows(100, vocab=5).train(0, 0, 12)


def test_windows_longer_than_the_data_are_refused():
    with pytest.raises(ShardError, match="longest shard has 8 tokens, but a window of 8 needs 9"):
        windows(8)


@pytest.mark.parametrize("sizes", [(7,), (1, 6), (5, 1, 9), (2, 2), (1,)])
def test_halves_hold_every_token_once_and_in_order(sizes):
    numbers = iter(np.split(np.arange(sum(sizes), dtype=np.uint16), np.cumsum(sizes)[:-1]))
    first, second = halves(list(numbers))
    assert np.concatenate([*first, *second]).tolist() == list(range(sum(sizes)))
    assert sum(map(len, first)) == sum(sizes) // 2
    assert all(len(part) for part in (*first, *second))


def test_a_digest_is_that_of_the_content(tmp_path):
    tokens = np.arange(500, dtype=np.uint16)
    for name in ("a.bin", "b.bin"):
        write_shard(tmp_path / name, tokens)
    assert digest_of([tmp_path / "a.bin"]) == digest_of([tmp_path / "b.bin"])
    for place in (0, 250, 499):
        other = tokens.copy()
        other[place] += 1
        write_shard(tmp_path / "b.bin", other)
        assert digest_of([tmp_path / "a.bin"]) != digest_of([tmp_path / "b.bin"])
    both = [tmp_path / "a.bin", tmp_path / "b.bin"]
    assert digest_of(both) != digest_of(both[::-1])
    assert digest_of(both) != digest_of(both[:1])


def test_of_a_large_shard_the_digest_reads_samples_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "WHOLE_BYTES", 4096)
    monkeypatch.setattr(shards, "SAMPLES", 8)
    monkeypatch.setattr(shards, "SAMPLE_BYTES", 128)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 1000, 100_000)
    write_shard(tmp_path / "a.bin", tokens)
    found = digest_of([tmp_path / "a.bin"])
    size = (tmp_path / "a.bin").stat().st_size
    read = sum(len(block) for block in shards.read_blocks(tmp_path / "a.bin"))
    assert read == 1024 + 8 * 128 < size
    for name, other in (
        ("other text", rng.integers(0, 1000, 100_000)),
        ("other length", tokens[:-1]),
        ("other start", np.append([7], tokens[1:])),
        ("other end", np.append(tokens[:-1], [7])),
        ("shifted", np.roll(tokens, 1)),
    ):
        write_shard(tmp_path / "b.bin", other)
        assert digest_of([tmp_path / "b.bin"]) != found, name
    between = tokens.copy()
    between[300] += 1  # between the first sample and the second: not seen, as documented
    write_shard(tmp_path / "b.bin", between)
    assert digest_of([tmp_path / "b.bin"]) == found
