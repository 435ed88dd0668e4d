"""Processes that can't be watched."""

from __future__ import annotations

import errno
import os
from typing import NoReturn

import pytest

from rl_protocol import PlaneLostError
from rl_protocol.support.host.process_watch import open_process
from rl_transferqueue.wire import process_liveness
from rl_transferqueue.wire.process_liveness import ProcessId, open_pidfd, this_process


@pytest.mark.parametrize("left", [0, 1])
def test_a_process_without_file_descriptors_says_so_and_keeps_none(monkeypatch: pytest.MonkeyPatch, left: int) -> None:
    """With one left, the process is opened, and its beginning can't be read."""
    process, opened = this_process(), list[int]()

    def full(*_: object) -> NoReturn:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    def keep(pid: int) -> int:
        opened.append(open_process(pid))
        return opened[-1]

    monkeypatch.setattr(process_liveness, "open_process", keep if left else full)
    monkeypatch.setattr(process_liveness, "start_of", full)
    with pytest.raises(PlaneLostError, match=r"The client \(pid \d+\) can't be watched: .*Too many open files"):
        open_pidfd(process, "The client")
    assert len(opened) == left
    for descriptor in opened:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


def test_a_later_process_with_the_same_pid_is_another_one() -> None:
    process = this_process()
    with pytest.raises(PlaneLostError, match="does not run on this host"):
        open_pidfd(ProcessId(process.pid, process.start + 1), "The client")
