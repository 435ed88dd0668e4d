"""Gain over the central driver, against payload size and against worker count."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

AXES = {"mib": "MiB written per step", "workers": "worker processes"}
LABELS = {
    "driver-buffers": "driver, pickled without copies",
    "transferqueue": "TransferQueue 0.1.11",
    "simple": "ours, shared memory",
    "ray": "ours, Ray object store",
}
NAMES = {"vl": "vision-language rows", "moe": "rows with routed experts", "text": "text rows"}
TICKS = (0.25, 0.5, 1, 2, 5, 10, 20, 50, 100)
COLOURS = {"driver-buffers": "tab:grey", "transferqueue": "tab:orange", "simple": "tab:blue", "ray": "tab:green"}


def plot_gains(rows: Sequence[dict[str, Any]], result: Path) -> None:
    """One PNG each for size and worker count, if it takes several values."""
    for axis in AXES:
        values = sorted({row[axis] for row in rows})
        if len(values) > 1 and any("times_faster" in row for row in rows):
            _plot(rows, axis, values, result.with_suffix(".png"))


def _plot(rows: Sequence[dict[str, Any]], axis: str, values: Sequence[float], path: Path) -> None:
    figure = Figure(figsize=(7.2, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    ax = figure.subplots()
    for plane in dict.fromkeys(row["plane"] for row in rows if "times_faster" in row):
        line = sorted((row[axis], row["times_faster"]) for row in rows if row["plane"] == plane)
        colour, (last, height) = COLOURS[plane], line[-1]
        ax.plot(*zip(*line, strict=True), marker="o", linewidth=2, color=colour)
        label = f" {height:.2g}x  {LABELS[plane]}"
        ax.annotate(label, (last, height), textcoords="offset points", xytext=(6, -3), color=colour, fontsize=9)
    ax.axhline(1, color="black", linewidth=1, linestyle="--")
    ax.annotate(
        " 1x  every batch through the driver", (values[-1], 1), textcoords="offset points", xytext=(6, 4), fontsize=9
    )
    first = rows[0]
    other = f"{first['workers']} workers" if axis == "mib" else f"{first['mib']:.0f} MiB per step"
    about = f"{NAMES.get(first['family'], first['family'])}, {first['layout']}, {other}"
    ax.set(xscale="log", yscale="log", xlabel=AXES[axis], ylabel="times faster than through the driver")
    ax.set_title(f"A PPO step without model compute ({about})", fontsize=11, loc="left")
    ax.set_xticks(values, [f"{value:.0f}" for value in values])
    ax.set_xlim(values[0] * 0.85, values[-1] * (values[-1] / values[0]) ** 0.55)
    heights = [row["times_faster"] for row in rows if "times_faster" in row]
    ticks = [tick for tick in TICKS if min(heights) / 2 < tick < max(heights) * 2]
    ax.set_yticks(ticks, [f"{tick:g}x" for tick in ticks])
    ax.minorticks_off()
    ax.grid(visible=True, alpha=0.3)
    ax.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
