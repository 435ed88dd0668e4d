"""SIGTERM ends a process from any of its threads, in spite of a handler."""

from __future__ import annotations

import signal
import subprocess
import sys

PROGRAM = """
import signal, threading, time
from rl_protocol.support.host.this_process import end_at_sigterm

signal.signal(signal.SIGTERM, lambda *_: print("handled", flush=True))
thread = threading.Thread(target=end_at_sigterm)
thread.start()
thread.join()
print("ready", flush=True)
time.sleep(100)
"""


def test_sigterm_ends_a_process_with_a_handler():
    process = subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    process.terminate()
    out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (-signal.SIGTERM, "")
