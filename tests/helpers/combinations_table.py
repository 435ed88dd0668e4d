"""The table of combinations as Markdown: `python combinations_table.py` prints it."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

RESULTS = Path(__file__).parents[1] / "integration" / "combinations.json"
MARKDOWN = Path(__file__).parents[2] / "docs" / "combinations.md"
ENGINES = ("torch", "fsdp", "megatron")
NAMES = {"full": "all weights", "lora": "LoRA", "dora": "DoRA", "actor": "actor", "critic": "actor and critic"}


def table(results: Mapping[str, Mapping[str, str]]) -> str:
    """A row for each adapters, roles and rows, a column for each engine, and the reasons below."""
    reasons = sorted({reason for cells in results.values() for reason in cells.values() if reason != "runs"})
    lines = [f"| trained | roles | rows | {' | '.join(ENGINES)} |", "|---|---|---|---|---|---|"]
    for cell in results[ENGINES[0]]:
        adapters, roles, rows = cell.split("/")
        found = [results[engine][cell] for engine in ENGINES]
        shown = [one if one == "runs" else f"refused ({reasons.index(one) + 1})" for one in found]
        lines.append(f"| {NAMES[adapters]} | {NAMES[roles]} | {rows} | {' | '.join(shown)} |")
    return "\n".join([*lines, "", *(f"({i}) `{reason}`" for i, reason in enumerate(reasons, 1))])


if __name__ == "__main__":
    sys.stdout.write(table(json.loads(RESULTS.read_text())) + "\n")
