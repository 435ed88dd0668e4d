"""Write the pictures of the report in docs/images/ from the report of a run.

Needs Chromium: `uv run --group dev python tests/helpers/screenshots.py outputs/RUN/report.html`
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from chromium import find_chromium, page

IMAGES = Path(__file__).parents[2] / "docs" / "images"


async def pictures(url: str) -> dict[str, bytes]:
    """The pictures by file name: the overview, and the response with the largest advantage."""
    program = find_chromium()
    if program is None:
        raise SystemExit("Chromium is not installed.")
    async with page(program, width=1200, height=760) as tab:
        await tab.theme("light")
        await tab.open(url)
        overview = await tab.screenshot()
        await tab.show("#samples?sort=advantage")
        await tab.evaluate("document.querySelector('a.row').click()")
        await tab.wait_for("document.querySelector('.tok')")
        await tab.size(1200, 620)
        await tab.show(await tab.evaluate("location.hash") + "?by=log_prob")
        return {"report-overview.png": overview, "report-sample.png": await tab.screenshot()}


if __name__ == "__main__":
    for name, content in asyncio.run(pictures(Path(sys.argv[1]).resolve().as_uri())).items():
        (IMAGES / name).write_bytes(content)
