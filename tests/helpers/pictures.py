"""Write the pictures of a run, of its terminal and its report, in docs/images/.

It trains the demo well, badly, and with a process for each role, and needs Chromium. Run it when
what a run prints, or its report, has changed:

    uv run --group dev python tests/helpers/pictures.py

The arguments are those of a run; `--out DIR` comes before them.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import pty
import re
import struct
import sys
import tempfile
import termios
from collections.abc import Sequence
from io import StringIO
from pathlib import Path

from chromium import find_chromium, page
from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text
from terminal_screen import TerminalScreen

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ROOT / "docs" / "images"
COLUMNS, LINES = 100, 40
RUNNING, DONE = 35, 27
"""Rows of the two pictures of the terminal: in the middle of the run, and at its end."""
THEME = TerminalTheme(
    (24, 26, 32),
    (222, 225, 230),
    [
        *((75, 80, 92), (235, 110, 110), (120, 200, 120), (225, 190, 90)),
        *((110, 160, 240), (205, 130, 220), (90, 195, 205), (222, 225, 230)),
    ],
)
ERASE = "\r\x1b[2K"
"""Begins what the live panel writes before it draws again."""
RECORD = 65536


def run_in_terminal(arguments: Sequence[str], folder: Path) -> str:
    """Run the demo in a new terminal, in this folder, and return all that it wrote.

    Raises:
        SystemExit: the run failed.
    """
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(folder)
        os.environ |= {"TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "LINES": str(LINES)}
        os.execv(sys.executable, [sys.executable, str(ROOT / "apps" / "ppo"), *arguments])
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    written = bytearray()
    while part := _read(terminal):
        written += part
    _, status = os.waitpid(process, 0)
    text = written.decode()
    if status:
        raise SystemExit(f"The run failed:\n{text[-4000:]}")
    return text


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, RECORD)
    except OSError:  # Linux: the other side has been closed
        return b""


def terminal_pictures(written: str) -> dict[str, str]:
    """SVG by file name, of a run with its live panel and of the end of the run."""
    steps = [(int(found[1]), int(found[2]), found.start()) for found in re.finditer(r"step +(\d+)/(\d+) ", written)]
    middle = next(start for step, total, start in steps if step > total // 2)
    running, done = TerminalScreen(), TerminalScreen()
    running.write(written[: written.rindex(ERASE, 0, middle)])
    done.write(written)
    last = next(number for number, row in enumerate(done.rows) if row.startswith("validation accuracy")) + 1
    return {
        "terminal-run.svg": _svg(running.styled[-RUNNING:]),
        "terminal-end.svg": _svg(done.styled[last - DONE : last]),
    }


def _svg(rows: Sequence[str]) -> str:
    """Draw these rows in a window; the browser's own font, because an image loads none."""
    console = Console(record=True, width=COLUMNS, file=StringIO(), force_terminal=True, color_system="truecolor")
    for row in rows:
        console.print(Text.from_ansi(row), soft_wrap=True)
    drawn = console.export_svg(title="uv run apps/ppo", theme=THEME, unique_id="run")
    drawn = re.sub(r"@font-face \{.*?\}", "", drawn, flags=re.DOTALL)
    drawn = drawn.replace("Fira Code", "DejaVu Sans Mono, Menlo, Consolas")
    return "\n".join(line.rstrip() for line in drawn.splitlines() if line.strip()) + "\n"


async def report_pictures(good: str, bad: str, separate: str) -> dict[str, bytes]:
    """PNG by file name: overviews of two reports, the response with the largest advantage, and the
    timeline of a run with several workers."""
    async with page(find_chromium() or "", width=1200, height=760) as tab:
        await tab.theme("light")
        await tab.open(bad)
        pictures = {"report-bad.png": await tab.screenshot()}
        await tab.open(good)
        pictures["report-overview.png"] = await tab.screenshot()
        await tab.show("#samples?sort=advantage")
        await tab.evaluate("document.querySelector('a.row').click()")
        await tab.wait_for("document.querySelector('.tok')")
        await tab.size(1200, 620)
        await tab.show(await tab.evaluate("location.hash") + "?by=log_prob")
        pictures["report-sample.png"] = await tab.screenshot()
        await tab.open(separate)
        await tab.size(1200, 700)
        await tab.show("#timeline")
        return pictures | {"report-timeline.png": await tab.screenshot()}


def main(arguments: list[str]) -> None:
    if find_chromium() is None:
        raise SystemExit("Chromium is not installed (apt-get install chromium).")
    out = IMAGES
    if arguments[:1] == ["--out"]:
        out, arguments = Path(arguments[1]), arguments[2:]
    with tempfile.TemporaryDirectory() as folder:
        written = run_in_terminal(["trainer.run_name=demo", *arguments], Path(folder))
        run_in_terminal(["trainer.run_name=fast", "actor.optim.lr=1e-2", *arguments], Path(folder))
        separate = ["trainer.run_name=separate", "placement=separate", "rollout.num_workers=2", *arguments]
        run_in_terminal([*separate, "trainer.total_training_steps=4"], Path(folder))
        reports = [Path(folder, "outputs", name, "report.html").as_uri() for name in ("demo", "fast", "separate")]
        pictures = {name: text.encode() for name, text in terminal_pictures(written).items()}
        pictures |= asyncio.run(report_pictures(*reports))
    for name, content in pictures.items():
        (out / name).write_bytes(content)


if __name__ == "__main__":
    main(sys.argv[1:])
