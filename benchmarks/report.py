"""Write the tables of RESULTS.md, and those of README.md, from the JSON files that git tracks.

uv run benchmarks/report.py
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from harness.chaos_runs import Run, bars, failures, matrix, missing, newest, runs_of
from harness.pairs import judge
from harness.result_schema import Document, Row, kind_of, load
from harness.results import RESULTS, ROOT, published_results
from harness.weight_sync.bars import bar_of

PAGE = ROOT / "benchmarks" / "RESULTS.md"
FRONT = ROOT / "README.md"


def learning_table(rows: list[Row]) -> str:
    """One line per run."""
    lines = [
        "| algorithm | varied | base | final | steps | s/step | whole run, s | warm-up in it | driver bytes/step, max |",
        "|" + "---|" * 9,
    ]
    for row in rows:
        lines.append(
            f"| {row['algorithm']} | {' '.join(row['overrides'])} | {row['base_accuracy']:.3f} | {row['final_accuracy']:.3f} | {row['steps']} "
            f"| {row['seconds_per_step']:.2f} | {row['seconds']:.0f} | {'yes' if row['warm_up'] else 'no'} | {row['driver_bytes_per_step_max']:.0f} |"
        )
    return "\n".join(lines)


def verdict_table(rows: list[Row], later: Mapping[str, str] | None = None) -> str:
    """One line per question with a bar; `later` has what was measured after it, by question."""
    again = {row["question"]: later[row["question"]] for row in rows if later and row["question"] in later}
    columns = ["question", "value", "must", "aim", "met", *(["measured later"] if again else [])]
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for row in rows:
        question = str(row["question"]).replace("|", r"\|")
        cells = [question, f"{row['value']:g}", row["must"], row["aim"], met(row)]
        lines.append("| " + " | ".join([*cells, *([again.get(row["question"], "")] if again else [])]) + " |")
    return "\n".join(lines)


def met(row: Row) -> str:
    """Which bar a verdict meets."""
    return "missed" if row["met"] == "no" else row["met"]


def measured_later(results: Mapping[Path, Document], path: Path) -> dict[str, str]:
    """Question -> the newest answer that is later than a result, and a link to it."""
    found: dict[str, str] = {}
    for other in by_time(results):
        if when(results, other) > when(results, path):
            info = f"{results[other].hardware['cpu']}, {day(other)}"
            for row in verdicts(results[other]):
                link = f"[{row['value']:g}]({other.relative_to(PAGE.parent)})"
                found[row["question"]] = f"{link} ({met(row)}; {info})"
    return found


def by_time(results: Mapping[Path, Document]) -> list[Path]:
    """The results, oldest first."""
    return sorted(results, key=partial(when, results))


def when(results: Mapping[Path, Document], path: Path) -> str:
    """The time of a result, or its day if it does not say the time."""
    return results[path].utc or day(path)


def day(path: Path) -> str:
    """The date of a result, by its folder."""
    return path.parent.name.partition("_")[0]


def verdicts(document: Document) -> list[Row]:
    """The rows with a bar, judged as in the tables."""
    rows = [row for row in document.rows if kind_of(row).name == "verdict"]
    return as_asked(rows) if document.benchmark.startswith("weight_sync") else rows


def as_asked(rows: list[Row]) -> list[Row]:
    """Weight-sync rows judged by today's bars, whatever bar the file was written with."""
    bars = [bar_of(row["question"]) for row in rows]
    return [
        {**row, **judge(row["value"], bar.must, bar.aim, at_least=bar.at_least)}
        for row, bar in zip(rows, bars, strict=True)
    ]


def parity_table(rows: list[Row]) -> str:
    """One line per family: the number of functions and their largest difference."""
    families: dict[str, list[float]] = {}
    for row in rows:
        families.setdefault(row["pair"].split()[0], []).append(row["largest_difference"])
    lines = ["| family | pairs | largest difference |", "|" + "---|" * 3]
    lines += [f"| {name} | {len(found)} | {max(found):.1e} |" for name, found in families.items()]
    return "\n".join(lines)


def plain_table(rows: list[Row], columns: Mapping[str, str]) -> str:
    """One line per row; `columns` maps headings to fields. A missing field is left blank."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(cell(row.get(name)) for name in columns.values()) + " |" for row in rows]
    return "\n".join(lines)


def cell(value: Any) -> str:
    """Format a value."""
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def with_plot(text: str, path: Path) -> str:
    """The table, and the plot beside its file if there is one."""
    plot = path.with_suffix(".png")
    return f"{text}\n\n![{path.stem}]({plot.relative_to(PAGE.parent)})" if plot.exists() else text


STEPS = {
    "payload": "family",
    "layout": "layout",
    "MiB/step": "mib",
    "workers": "workers",
    "compute": "compute",
    "compute s": "compute_s",
    "plane": "plane",
    "s/step": "step_s",
    "times faster": "times_faster",
    "times less CPU": "times_less_cpu",
    "gain %": "gain_percent",
    "transfer share": "transfer_share",
    "stage p50 ms": "stage_p50_ms",
    "stage p99 ms": "stage_p99_ms",
    "MiB through driver": "driver_mib",
    "driver RSS rise MiB": "driver_rss_mib",
    "driver CPU s": "driver_cpu_s",
    "plane CPU s": "plane_cpu_s",
}
BACKENDS = {
    "backend": "backend",
    "payload": "payload",
    "MiB": "payload_mib",
    "put GiB/s": "put_gib_s",
    "get GiB/s": "get_gib_s",
    "put p99 ms": "put_p99_ms",
    "get p99 ms": "get_p99_ms",
    "CPU-s/GiB": "cpu_s_per_gib",
    "copies put+get": "copies",
    "memory per byte": "memory_per_byte",
}
TRAINING = {"plane": "plane", "workers": "workers", "steps": "steps", "SHA-256 of the parameters": "parameters_sha256"}
VALIDATION = {
    "measured": "measured",
    "plane": "plane",
    "s/step measured": "measured_s",
    "s/step predicted": "predicted_s",
    "error %": "error_percent",
}
PREDICTION = {
    "run": "published",
    "nodes": "nodes",
    "GiB/step assumed": "gib_per_step",
    "transfer s, driver": "driver_transfer_s",
    "transfer s, ours": "ours_transfer_s",
    "step s assumed": "step_s",
    "gain % predicted": "prediction",
    "gain % published": "published_gain_percent",
}
OPERATIONS = {
    "operation": "operation",
    "on": "subject",
    "MiB": "mib",
    "median ms": "median_ms",
    "interquartile range ms": "iqr_ms",
    "rounds": "rounds",
}
CHANGES = {
    "learning rate": "learning_rate",
    "syncs": "delta_syncs",
    "bytes in full": "full_bytes",
    "changed, median": "changed_share_median",
    "changed, most": "changed_share_max",
    "bytes sent, median": "delta_bytes_median",
    "most of ideal": "of_ideal_max",
    "most of full": "of_full_max",
}
GRPO_STEPS = {
    "cell": "cell",
    "side": "side",
    "s/step": "step_s",
    "gen": "gen_s",
    "old log-probs": "old_log_prob_s",
    "reference": "ref_s",
    "update": "update_actor_s",
    "CPU s/step": "cpu_s_per_step",
    "peak MiB (PSS)": "peak_pss_mib",
    "s to accuracy 0.90": "reached_s",
    "whole command, s": "command_s",
    "tokens/response": "tokens_per_response",
    "pairs": "pairs",
}
_GRPO_STEP = {
    "cell": "cell",
    "processor": "hardware",
    "s/step": "ours",
    "TRL": "trl",
    "bare PyTorch loop": "floor",
    "against TRL": "step",
    "must": "must",
}
AGAINST_TRL = {**_GRPO_STEP, "CPU seconds against TRL": "cpu", "pairs": "pairs"}
NEWEST_AGAINST_TRL = {**_GRPO_STEP, "met": "met"}
PLACEMENTS = {
    "placement": "placement",
    "s to the end of step 1": "first_step_s",
    "s/step": "step_s",
    "CPU s/step": "cpu_s_per_step",
    "peak MiB (PSS)": "peak_pss_mib",
    "pairs": "pairs",
}
MEMORY = {
    "role": "memory_of",
    "model": "model",
    "tokens": "tokens",
    "peak MiB": "measured_mib",
    "with loading, MiB": "first_mib",
    "estimated MiB": "estimated_mib",
    "tokens/s": "tokens_per_s",
}
ASYNCHRONY = {
    "cell": "async_cell",
    "engine": "engine",
    "steps/h": "steps_per_hour",
    "s/step": "step_s",
    "largest staleness": "staleness_max",
    "rollout starved": "rollout_starved",
    "rollout, refit": "rollout_refit",
    "trainer starved": "trainer_starved",
    "trainer, refit": "trainer_refit",
    "reward starved": "reward_starved",
    "reward, refit": "reward_refit",
    "runs": "runs",
}
LATENCIES = {"latencies": "latency", "median s": "median_s", "p99 / p50": "p99_over_p50", "seed": "seed"}
SPEED_UPS = {"system (others: as they publish it)": "system", "times the speed of its synchronous loop": "speed_up"}
FAILURES = {
    "run": "run",
    "at commit": "commit",
    "faults": "faults",
    "what was wrong": "what",
    "survived at commit": "survived",
}
HEADLINE = {
    "plane": "plane",
    "who carries the rows": "who",
    "s/step": "step_s",
    "times the s/step of `simple`": "ratio",
    "the same, median of paired ratios": "paired",
}
HEADLINE_PLANES = {"driver", "driver-buffers", "simple"}
WHO = {
    "driver": "a central driver, pickled as verl's DataProto is",
    "driver-buffers": "a central driver at its best: pickled without a copy",
    "transferqueue": "TransferQueue 0.1.11",
    "simple": "rl-transferqueue",
    "ray": "rl-transferqueue over Ray's object store",
}
PLAIN = {
    "operation": OPERATIONS,
    "step": STEPS,
    "backend": BACKENDS,
    "training": TRAINING,
    "validation": VALIDATION,
    "prediction": PREDICTION,
    "changes": CHANGES,
    "grpo step": GRPO_STEPS,
    "placement": PLACEMENTS,
    "memory": MEMORY,
    "asynchrony": ASYNCHRONY,
    "latencies": LATENCIES,
    "speed-up": SPEED_UPS,
}


def table(document: Document, path: Path, later: Mapping[str, str]) -> str:
    """A table for each kind of row, in the order in which they come."""
    kinds: dict[str, list[Row]] = {}
    for row in document.rows:
        kinds.setdefault(kind_of(row).name, []).append(row)
    if "verdict" in kinds:
        kinds["verdict"] = verdicts(document)
    verdict = partial(verdict_table, later=later)
    made = {"verdict": verdict, "parity": parity_table, "learning": learning_table, "chaos": chaos_table}
    parts = [plain_table(rows, PLAIN[kind]) if kind in PLAIN else made[kind](rows) for kind, rows in kinds.items()]
    return with_plot("\n\n".join(parts), path)


def section(results: Mapping[Path, Document], path: Path) -> str:
    """Heading, provenance and table of one result."""
    document = results[path]
    info = document.hardware
    origin = f"`{' '.join(document.command)}` at commit {document.commit} on {info['cores']} cores of {info['cpu']}, {info['memory_gib']} GiB"
    link = path.relative_to(PAGE.parent)
    return f"## {document.benchmark}\n\n{origin} ([JSON]({link})).\n\n{table(document, path, measured_later(results, path))}\n"


def headline(document: Document, path: Path) -> str:
    """Every plane beside ours, with both central drivers."""
    steps = {row["plane"]: row for row in document.rows if kind_of(row).name == "step"}
    ours = steps["simple"]
    rows = [
        {
            "plane": plane,
            "who": WHO.get(plane, ""),
            "step_s": row["step_s"],
            "ratio": row["step_s"] / ours["step_s"],
            "paired": ours["times_faster"] if plane == "driver" else None,
        }
        for plane, row in steps.items()
    ]
    what = f"{ours['family']}, {ours['layout']}, {ours['mib']:g} MiB/step, {ours['workers']} workers, no compute"
    link = path.relative_to(PAGE.parent)
    return f"## Headline: central drivers against the data plane\n\n{what} ([JSON]({link})).\n\n{plain_table(rows, HEADLINE)}\n"


def against_trl(results: Mapping[Path, Document]) -> str:
    """Every comparison with TRL in one line, by cell and processor."""
    lines = sorted(
        filter(None, (grpo_steps(found, path, PAGE) for path, found in results.items())),
        key=lambda line: (by_size(line["cell"]), line["hardware"]),
    )
    return f"## Headline: a GRPO step against TRL\n\n{plain_table(lines, AGAINST_TRL)}\n"


def newest_against_trl(results: Mapping[Path, Document]) -> str:
    """The newest comparison of each cell on each processor."""
    lines: dict[tuple[tuple[float, str], str], Row] = {}
    for path in by_time(results):
        if line := grpo_steps(results[path], path, FRONT):
            lines[by_size(line["cell"]), results[path].hardware["cpu"]] = line
    return plain_table([lines[key] for key in sorted(lines)], NEWEST_AGAINST_TRL)


def by_size(cell: str) -> tuple[float, str]:
    """Sort key of a cell: its million parameters, then its name."""
    return float(cell.partition("M-")[0]), cell


def grpo_steps(document: Document, path: Path, page: Path) -> Row | None:
    """A step of all three sides of a comparison with TRL, with links for a page; None: it has
    less.
    """
    sides = {row["side"]: row for row in document.rows if kind_of(row).name == "grpo step"}
    if not sides.keys() >= {"ours", "trl", "floor"}:
        return None
    verdicts = {row["question"]: row for row in document.rows if kind_of(row).name == "verdict"}
    name = sides["ours"]["cell"]
    step = verdicts[f"{name}: seconds per step against TRL"]
    return {
        "cell": name,
        "hardware": f"[{document.hardware['cpu']}]({path.relative_to(page.parent)})",
        **{side: row["step_s"] for side, row in sides.items()},
        "step": step["value"],
        "must": step["must"],
        "met": met(step),
        "cpu": verdicts[f"{name}: CPU seconds per step against TRL"]["value"],
        "pairs": sides["ours"]["pairs"],
    }


def chaos_table(rows: list[Row]) -> str:
    """How many runs of a file failed; the headline has the others."""
    failed = sum(not row["good"] for row in rows)
    return f"{len(rows)} runs, of which {failed} failed; see [Runs with faults](#headline-runs-with-faults)."


def chaos_runs() -> list[Run]:
    """The last repetition of each published run with faults."""
    return newest(runs_of(map(load, published_results())))


def chaos_matrix(runs: list[Run]) -> str:
    """What there is beside what there must be, and the matrix of the application."""
    app = [run.outcome for run in runs if run.outcome.kind == "app"]
    return f"{verdict_table(bars(runs))}\n\n{matrix(app, 'app')}"


def chaos_headline(results: Mapping[Path, Document]) -> str:
    """Bars, the matrix of both kinds of runs, missing cells and all failures."""
    every = runs_of(results.values())
    runs = newest(every)
    plane = [run.outcome for run in runs if run.outcome.kind == "plane"]
    without = missing([run.outcome for run in runs if run.outcome.kind == "app"], "app")
    return "\n\n".join(
        [
            "## Headline: runs with faults",
            "Runs of the application by victim and fault (`rl chaos`), the last repetition of each:",
            chaos_matrix(runs),
            f"Missing: {', '.join(without) or 'none'}.",
            "The same with a stand-in for models and Ray:",
            matrix(plane, "plane"),
            "Every run that failed, and the commit at which the same faults were survived later:",
            plain_table(failures(every), FAILURES) + "\n",
        ]
    )


def tables() -> str:
    """All tables; first the headlines: central drivers, a step, runs with faults."""
    results = {path: load(path) for path in published_results()}
    whole = [path for path in by_time(results) if {row.get("plane") for row in results[path].rows} >= HEADLINE_PLANES]
    heads = [headline(results[path], path) for path in whole[-1:]]
    return "\n".join(
        [*heads, against_trl(results), chaos_headline(results), *(section(results, path) for path in results)]
    )


def made(page: Path, name: str) -> tuple[str, str, str]:
    """What is before the marks of some tables on a page, between them, and behind."""
    before, begin, rest = page.read_text(encoding="utf-8").partition(f"<!-- {name}: made by report.py -->\n")
    between, end, behind = rest.partition(f"<!-- end of {name} -->\n")
    return before + begin, between, end + behind


def rewrite(page: Path, name: str, text: str) -> None:
    """Replace what is between marks."""
    before, _, behind = made(page, name)
    page.write_text(f"{before}\n{text}\n{behind}", encoding="utf-8")


def main() -> None:
    """Rewrite both pages."""
    rewrite(PAGE, "tables", tables())
    rewrite(FRONT, "runs with faults", chaos_matrix(chaos_runs()) + "\n")
    rewrite(FRONT, "steps against TRL", newest_against_trl({path: load(path) for path in published_results()}) + "\n")
    for path in sorted(set(RESULTS.glob("*/*/*.json")) - set(published_results())):
        print(f"left out: git does not track {path.relative_to(ROOT)}; to publish it: git add, then run this again")


if __name__ == "__main__":
    main()
