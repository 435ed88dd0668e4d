"""The digest of a tensor is what digests.py says, however it is computed; the threads that help with it leave nothing behind."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_ckpt_engine.crew import Crew
from rl_ckpt_engine.digests import BLOCK_BYTES, TensorDigest, tensor_digest


def test_golden_digests() -> None:
    assert (
        tensor_digest(memoryview(b"")).hex() == "99aa06d3014798d86001c324468d497f"
    )  # XXH3 of nothing, as its specification has it
    assert tensor_digest(memoryview(b"abc")) == xxhash.xxh3_128(b"abc").digest()
    data = bytes(range(256)) * (BLOCK_BYTES // 128) + b"tail"
    parts = [data[:BLOCK_BYTES], data[BLOCK_BYTES : 2 * BLOCK_BYTES], b"tail"]
    of_parts = b"".join(xxhash.xxh3_128(part).digest() for part in parts)
    assert tensor_digest(memoryview(data)) == xxhash.xxh3_128(of_parts).digest()
    assert tensor_digest(memoryview(data)).hex() == "2a717ab926675a51a831dc9a51d492a7"


@settings(max_examples=20)
@given(st.integers(0, 2 * BLOCK_BYTES + 9), st.lists(st.integers(0, 2 * BLOCK_BYTES), max_size=5), st.integers(0, 9))
def test_pieces_of_any_size_give_the_same_digest(size: int, cuts: list[int], seed: int) -> None:
    data = memoryview(np.random.default_rng(seed).bytes(size))
    digest = TensorDigest()
    for again in range(2):  # the second tensor finds nothing of the first
        ends = sorted({min(cut, size) for cut in cuts} | {size})
        for start, end in zip([0, *ends], ends, strict=False):
            digest.update(data[start:end])
        assert digest.digest() == tensor_digest(data), again


@pytest.mark.parametrize("count", [0, 1, 2, 100])
@pytest.mark.parametrize("processors", [1, 2, 4, 64])
def test_a_crew_does_each_piece_of_work_once_and_answers_in_order(
    processors: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(processors)))
    done: list[int] = []
    with Crew() as crew:
        assert crew.map(lambda number: done.append(number) or number * 2, count) == [2 * n for n in range(count)]
    assert sorted(done) == list(range(count))


@pytest.mark.parametrize(("processors", "threads"), [(1, 1), (2, 1), (3, 1), (4, 2), (64, 4)])
def test_a_crew_leaves_half_of_the_processors_to_the_other_end(
    processors: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(processors)))
    together, workers = threading.Barrier(threads), set[int]()

    def work(number: int) -> None:
        if number < threads:
            together.wait(9.0)
        workers.add(threading.get_ident())

    with Crew() as crew:
        crew.map(work, 100)
    assert len(workers) == threads


def test_an_error_in_any_thread_is_raised_when_all_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2, 3})
    running = threading.Semaphore(0)

    def work(number: int) -> int:
        running.release()
        if threading.current_thread() is not threading.main_thread():
            raise OSError("no memory")
        while running._value < 2:  # the helper has begun
            threading.Event().wait(0.001)
        return number

    before = threading.active_count()
    with Crew() as crew, pytest.raises(OSError, match="no memory"):
        crew.map(work, 5)
    assert threading.active_count() == before
