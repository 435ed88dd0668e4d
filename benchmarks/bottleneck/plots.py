"""Gain over the central driver, against payload size and against worker count."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

AXES = {"mib": "MiB written per step", "workers": "worker processes"}
LABELS = {
    "driver-buffers": "through the driver, without pickling copies",
    "transferqueue": "TransferQueue 0.1.11",
    "simple": "ours, shared memory (simple)",
    "ray": "ours, Ray object store (ray)",
}
COLOURS = {"driver-buffers": "tab:grey", "transferqueue": "tab:orange", "simple": "tab:blue", "ray": "tab:green"}


def plot_gains(rows: Sequence[dict[str, Any]], result: Path) -> None:
    """One PNG beside the result for each of size and worker count that takes several values; nothing if none does."""
    for axis in AXES:
        values = sorted({row[axis] for row in rows})
        if len(values) > 1 and any("times_faster" in row for row in rows):
            _plot(rows, axis, values, result.with_suffix(".png"))


def _plot(rows: Sequence[dict[str, Any]], axis: str, values: Sequence[float], path: Path) -> None:
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    ax = figure.subplots()
    for plane in dict.fromkeys(row["plane"] for row in rows if "times_faster" in row):
        line = sorted((row[axis], row["times_faster"]) for row in rows if row["plane"] == plane)
        ax.plot(*zip(*line, strict=True), marker="o", linewidth=2, color=COLOURS[plane], label=LABELS[plane])
        ax.annotate(f"{line[-1][1]:.3g}x", line[-1], textcoords="offset points", xytext=(6, 4), color=COLOURS[plane])
    ax.axhline(1, color="black", linewidth=1, linestyle="--")
    ax.annotate("every batch through the driver = 1", (values[0], 1), textcoords="offset points", xytext=(0, -12))
    first = rows[0]
    other = f"{first['workers']} workers" if axis == "mib" else f"{first['mib']:g} MiB per step"
    ax.set(
        xscale="log",
        yscale="log",
        xlabel=AXES[axis],
        ylabel="steps are this many times faster",
        title=f"A PPO step without compute: {first['family']}, {first['layout']}, {other}",
    )
    ax.set_xticks(values, [f"{value:g}" for value in values])
    ax.minorticks_off()
    ax.legend(loc="best", fontsize=8)
    ax.grid(visible=True, which="both", alpha=0.3)
    figure.savefig(path, dpi=120)
