"""A run on a terminal shows the panel of `rl watch` below the lines of its steps."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import termios
import time

import pytest
from app_runs import MARK, command
from terminal_screen import TerminalScreen

ROWS, COLUMNS, STEPS = 40, 110, 12
SLOW_REWARD = """
import time

def score(data_source, solution_str, ground_truth, extra_info=None):
    time.sleep(0.01)
    return float(solution_str.strip() == ground_truth)
"""
"""Of 64 responses a step, so that the steps take several times as long as the panel is shown."""


def on_terminal(words, mark, cwd, timeout_s=400.0):
    """Run a command on a terminal of its own; returns its exit code and what it wrote."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    env = {**os.environ, MARK: mark, "TERM": "xterm-256color"}
    for name in ("COLUMNS", "LINES", "NO_COLOR"):
        env.pop(name, None)
    process = subprocess.Popen(words, stdin=slave, stdout=slave, stderr=slave, cwd=cwd, env=env, start_new_session=True)
    os.close(slave)
    parts, deadline = [], time.monotonic() + timeout_s
    try:
        while True:
            assert time.monotonic() < deadline, b"".join(parts)
            if not select.select([master], [], [], 1.0)[0]:
                continue
            try:
                parts.append(os.read(master, 65536))
            except OSError:  # EIO: all processes have closed the terminal
                break
        return process.wait(60), b"".join(parts).decode()
    finally:
        process.kill()
        process.wait()
        os.close(master)


@pytest.mark.parametrize(
    "live", [pytest.param(True, marks=pytest.mark.slow), pytest.param(False, marks=pytest.mark.nightly)]
)
def test_the_panel_moves_below_the_lines_of_the_steps(tmp_path, base_model, mark, live):
    reward = tmp_path / "slow.py"
    reward.write_text(SLOW_REWARD)
    settings = (
        "--trust",
        str(reward),
        f"reward.function={reward}:score",
        f"trainer.output_dir={tmp_path}",
        "trainer.run_name=run",
        f"model.path={base_model}",
        f"trainer.total_training_steps={STEPS}",
        "data.val_size=16",
        "data.train_batch_size=8",
        "actor.ppo_mini_batch_size=8",
        "rollout.num_workers=1",
        f"trainer.live_panel={str(live).lower()}",
    )
    code, written = on_terminal(command(*settings), mark, tmp_path)
    assert code == 0, written
    screen = TerminalScreen()
    screen.write(written)
    lines = screen.text.splitlines()
    steps = [line.split("/")[0] for line in lines if f"/{STEPS}  reward" in line]
    assert steps == [f"step {step:2}" for step in range(1, STEPS + 1)], screen.text
    assert screen.highest < ROWS
    shown = {words for words in ("busy", "tokens/s", f"of {STEPS}, ") if words in written}
    assert shown == ({"busy", "tokens/s", f"of {STEPS}, "} if live else set())
    assert "busy" not in screen.text  # the panel is gone
