"""The panel moves below the lines of the steps, fits the terminal, and leaves nothing behind."""

from __future__ import annotations

import io
import json
import threading
import time

import pytest
from rich.console import Console
from rich.text import Text
from terminal_screen import TerminalScreen

from rl_app_ppo.api.command_console import RunConsole
from rl_app_ppo.outputs import console
from rl_app_ppo.outputs.console import Screen
from rl_app_ppo.watch.live_panel import live_panel
from rl_trainer.record.record_file import RecordFile
from rl_trainer.record.record_rows import CallRow, StartRow, StepRow


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.yaml").write_text("{}\n")
    steps = [{"step": step, "critic/score/mean": step / 4, "perf/throughput": 1234.0} for step in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in steps))
    file, now = RecordFile(tmp_path / "record", "driver"), time.time()
    file.append([StartRow(at=now - 9, steps=8), StepRow(at=now - 2, step=1), StepRow(at=now - 1, step=2)])
    file.append([CallRow(at=now, worker="actor", stage="update_actor")])
    file.close()
    return tmp_path


def terminal(width, height):
    """A terminal of that size."""
    return Console(file=io.StringIO(), force_terminal=True, width=width, height=height, _environ={"TERM": "xterm"})


def written_with(out, wanted):
    """What was written to the terminal as soon as it has `wanted`."""
    deadline = time.monotonic() + 60
    while wanted not in (text := out.file.getvalue()):
        assert time.monotonic() < deadline, text
        time.sleep(0.02)
    return text


@pytest.mark.parametrize(("width", "height"), [(100, 40), (60, 12), (80, 24)])
def test_lines_stay_above_a_panel_that_is_gone_at_the_end(folder, width, height):
    out = terminal(width, height)
    screen = Screen(out)
    with screen:
        with live_panel(folder, screen):
            screen.note("step 1/8")
            screen.bar("training", 1, 8)
            during = written_with(out, "update_actor")
            screen.note("step 2/8")
            screen.bar("training", 2, 8)
        screen.note("after the run")
    seen = TerminalScreen()
    seen.write(during)
    before = seen.text
    assert "step 2 of 8" in before
    assert "1,234 tokens/s" in before
    assert ("mean score" in before) is (height > 12)
    assert max(map(len, before.splitlines())) <= width
    seen.write(out.file.getvalue()[len(during) :])
    assert seen.text.split("\n") == ["step 1/8", "step 2/8", "after the run"]
    assert seen.highest < height


class SlowTerminal(io.StringIO):
    """Another thread gets its turn before each write."""

    def write(self, text):
        time.sleep(0.0005)
        return super().write(text)


def test_lines_of_several_threads_leave_nothing_of_a_panel_that_changes_its_height(monkeypatch):
    """A frame must erase what is on the terminal, not what another thread is about to write."""
    monkeypatch.setattr(console, "REFRESH", 1000.0)
    out = RunConsole(
        file=SlowTerminal(), force_terminal=True, width=60, height=24, _environ={"TERM": "xterm"}, highlight=False
    )
    screen, lines = Screen(out), [f"thread {thread} line {line}" for thread in range(3) for line in range(40)]

    def notes(mine):
        for line in mine:
            screen.panel(Text("\n".join("panel" for _ in range(1 + len(line) * hash(line) % 9))))
            screen.note(line)

    with screen:
        threads = [threading.Thread(target=notes, args=(lines[at : at + 40],)) for at in (0, 40, 80)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    seen = TerminalScreen()
    seen.write(out.file.getvalue())
    assert sorted(seen.text.split("\n")) == sorted(lines)


def test_without_a_terminal_there_is_no_panel(folder):
    for out in (
        Console(file=io.StringIO()),
        Console(file=io.StringIO(), force_terminal=True, _environ={"TERM": "dumb"}),
    ):
        screen = Screen(out)
        with screen, live_panel(folder, screen):
            assert screen.size is None
            screen.note("step 1/8")
        assert out.file.getvalue() == "step 1/8\n"
