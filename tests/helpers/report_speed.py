"""Measure how soon a large report can be used in Chromium, and write the result.

    uv run --group dev --group bench python tests/helpers/report_speed.py [--smoke]

The report has 100 steps of 512 trajectories, every one of them shown. Each time is that of a new
browser, from the navigation until the page says that it is ready and a view has been painted.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from pathlib import Path

from chromium import find_chromium, page

from rl_app_ppo.report.page import write_report

ROOT = Path(__file__).resolve().parents[2]
VIEWS = ("#overview", "#samples?sort=gap", "#timeline")


async def opened(program: str, file: Path, view: str) -> float:
    """Seconds until a view of the report is painted, in a new browser."""
    async with page(program) as tab:
        start = time.perf_counter()
        await tab.open(f"{file.as_uri()}{view}")
        await tab.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        return time.perf_counter() - start


def main() -> None:
    """Measure, print and write the result."""
    sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tests" / "helpers" / "runs")]
    from harness.pairs import publish, verdict
    from hostile_run import write_run

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="tiny, and nothing is written")
    smoke = parser.parse_args().smoke
    steps, count, repeats = (2, 8, 1) if smoke else (100, 512, 5)
    program = find_chromium()
    if program is None:
        raise SystemExit("chromium is not installed (apt-get install chromium)")
    with tempfile.TemporaryDirectory() as folder:
        run = write_run(Path(folder, "run"), steps=steps, count=count, texts=tuple("0123456789+="))
        file, start = Path(folder, "report.html"), time.perf_counter()
        size = write_report([run], file) / 1e6
        written = time.perf_counter() - start
        what = f"{steps} steps of {count} trajectories"
        rows = [verdict(f"report: MB of {what}", size, 3.0, 2.0, at_least=False, written_s=written)]
        for view in VIEWS:
            times = [asyncio.run(opened(program, file, view)) for _ in range(repeats)]
            question = f"report: seconds until {view} is painted, {what}"
            rows.append(verdict(question, statistics.median(times), 2.0, 1.0, at_least=False, times_s=times))
    if not smoke:
        publish("report", rows)


if __name__ == "__main__":
    main()
