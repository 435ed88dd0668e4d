"""ThreadTeam: each piece of work runs once, results keep their order, all threads end."""

from __future__ import annotations

import threading

import pytest

from rl_ckpt_engine.payload.thread_team import ThreadTeam


@pytest.mark.parametrize("count", [0, 1, 2, 100])
@pytest.mark.parametrize("processors", [1, 2, 4, 64])
def test_a_team_does_each_piece_of_work_once_and_answers_in_order(
    processors: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rl_ckpt_engine.payload.thread_team.usable_cores", lambda: processors)
    done: list[int] = []
    with ThreadTeam() as team:
        assert team.map(lambda number: done.append(number) or number * 2, count) == [2 * n for n in range(count)]
    assert sorted(done) == list(range(count))


@pytest.mark.parametrize(("processors", "threads"), [(1, 1), (2, 1), (3, 1), (4, 2), (8, 4), (64, 4)])
def test_a_team_has_a_thread_for_every_second_processor_up_to_four(
    processors: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rl_ckpt_engine.payload.thread_team.usable_cores", lambda: processors)
    together, workers = threading.Barrier(threads), set[int]()

    def work(number: int) -> None:
        if number < threads:
            together.wait(9.0)
        workers.add(threading.get_ident())

    with ThreadTeam() as team:
        team.map(work, 100)
    assert len(workers) == threads


def test_an_error_in_any_thread_is_raised_when_all_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl_ckpt_engine.payload.thread_team.usable_cores", lambda: 4)
    running = threading.Semaphore(0)

    def work(number: int) -> int:
        running.release()
        if threading.current_thread() is not threading.main_thread():
            raise OSError("no memory")
        while running._value < 2:  # until a helper thread has started
            threading.Event().wait(0.001)
        return number

    before = threading.active_count()
    with ThreadTeam() as team, pytest.raises(OSError, match="no memory"):
        team.map(work, 5)
    assert threading.active_count() <= before  # a thread of an earlier test may still end
