"""Processes that can't be watched."""

from __future__ import annotations

import os
import resource

import pytest

from rl_protocol import PlaneLostError
from rl_transferqueue.wire.process_liveness import ProcessId, open_pidfd, this_process


@pytest.mark.parametrize("left", [0, 1])
def test_a_process_without_file_descriptors_says_so_and_keeps_none(left: int) -> None:
    process = this_process()
    free = os.open(os.devnull, os.O_RDONLY)
    os.close(free)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + left, hard))
    try:
        with pytest.raises(PlaneLostError, match=r"The client \(pid \d+\) can't be watched: .*Too many open files"):
            open_pidfd(process, "The client")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    again = os.open(os.devnull, os.O_RDONLY)
    os.close(again)
    assert again == free


def test_a_later_process_with_the_same_pid_is_another_one() -> None:
    process = this_process()
    with pytest.raises(PlaneLostError, match="does not run on this host"):
        open_pidfd(ProcessId(process.pid, process.start + 1), "The client")
