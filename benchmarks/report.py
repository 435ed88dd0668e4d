"""Makes the tables of benchmarks/README.md from the committed JSON: `uv run benchmarks/report.py`. No figure there is typed by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from common import RESULTS, ROOT

README = ROOT / "benchmarks" / "README.md"
BEGIN, END = "<!-- tables: made by report.py -->\n", "<!-- end of tables -->\n"


def learning_table(document: dict[str, Any], path: Path) -> str:
    """One line per run."""
    lines = [
        "| algorithm | varied | base | final | steps | s/step | whole run, s | warm-up in it | driver bytes/step, max |",
        "|" + "---|" * 9,
    ]
    for row in document["rows"]:
        lines.append(
            f"| {row['algorithm']} | {' '.join(row['overrides'])} | {row['base_accuracy']:.3f} | {row['final_accuracy']:.3f} | {row['steps']} "
            f"| {row['seconds_per_step']:.2f} | {row['seconds']:.0f} | {'yes' if row['warm_up'] else 'no'} | {row['driver_bytes_per_step_max']:.0f} |"
        )
    return "\n".join([*lines, "", f"![curves]({path.with_suffix('.png').relative_to(README.parent)})"])


def verdict_table(document: dict[str, Any]) -> str:
    """One line per question with a bar."""
    lines = ["| question | value | must | aim | met |", "|" + "---|" * 5]
    for row in document["rows"]:
        lines.append(f"| {row['question']} | {row['value']:g} | {row['must']} | {row['aim']} | {row['met']} |")
    return "\n".join(lines)


def parity_table(document: dict[str, Any]) -> str:
    """One line per family of functions: how many were compared, and the largest difference among them."""
    families: dict[str, list[float]] = {}
    for row in document["rows"]:
        families.setdefault(row["pair"].split()[0], []).append(row["largest_difference"])
    lines = ["| family | pairs | largest difference |", "|" + "---|" * 3]
    lines += [f"| {name} | {len(found)} | {max(found):.1e} |" for name, found in families.items()]
    return "\n".join(lines)


def table(document: dict[str, Any], path: Path) -> str:
    """The table that fits the rows."""
    first = document["rows"][0]
    if "algorithm" in first:
        return learning_table(document, path)
    return parity_table(document) if "pair" in first else verdict_table(document)


def section(path: Path) -> str:
    """Heading, provenance and table of one result."""
    document = json.loads(path.read_text(encoding="utf-8"))
    info = document["hardware"]
    origin = f"`{' '.join(document['command'])}` at commit {document['commit']} on {info['cores']} cores of {info['cpu']}, {info['memory_gib']} GiB"
    link = path.relative_to(README.parent)
    return f"### {document['benchmark']}\n\n{origin} ([JSON]({link})).\n\n{table(document, path)}\n"


def main() -> None:
    """Rewrite the part of the README between the marks."""
    before, _, rest = README.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    sections = "\n".join(section(path) for path in sorted(RESULTS.glob("*/*/*.json")))
    README.write_text(before + BEGIN + "\n" + sections + "\n" + END + after, encoding="utf-8")


if __name__ == "__main__":
    main()
