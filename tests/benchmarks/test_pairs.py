"""CPU time of processes, as benchmarks report it."""

from __future__ import annotations

import os
import subprocess
import threading
import time

from harness.pairs import cpu_seconds


def test_the_time_of_a_thread_that_has_ended_counts() -> None:
    def work() -> None:
        end = time.thread_time() + 0.06  # the kernel counts in ticks of 0.01 s
        while time.thread_time() < end:
            pass

    before = cpu_seconds([os.getpid()])
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert cpu_seconds([os.getpid()]) - before >= 0.03


def test_a_process_that_is_gone_counts_nothing() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait(60)
    assert cpu_seconds([gone.pid]) == 0
