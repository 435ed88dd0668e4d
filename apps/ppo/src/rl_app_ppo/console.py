"""What the user sees: a header, progress bars, one line per step, a learning curve. Nothing else is written to the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import plotext
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from rl_app_ppo.banner import described
from rl_app_ppo.schema import AppConfig
from rl_ckpt_engine.progress import PHASES, SyncProgress
from rl_trainer import Hook

ACCURACY = "acc/mean@"


def validation_accuracy(metrics: Mapping[str, float]) -> float | None:
    """Mean of the val-core accuracies, or None where the metrics hold none."""
    found = [value for name, value in metrics.items() if name.startswith("val-core/") and ACCURACY in name]
    return sum(found) / len(found) if found else None


def step_line(step: int, total: int, metrics: Mapping[str, float]) -> str:
    """One line about one step; its fields keep their columns from step to step. `kl` is the divergence from the reference, nats per token,
    and left out where there is no reference."""
    kl = metrics.get("actor/ref_kl", metrics.get("actor/reward_kl_penalty"))
    parts = [
        f"step {step:>{len(str(total))}}/{total}",
        f"reward {metrics.get('critic/score/mean', 0.0):6.3f}",
        f"accuracy {metrics.get('critic/acc/mean', 0.0):5.3f}",
        f"length {metrics.get('response_length/mean', 0.0):5.2f}",
        *([f"kl {kl:7.4f}"] if kl is not None else []),
        f"entropy {metrics.get('actor/entropy', 0.0):5.3f}",
        f"{metrics.get('timing_s/step', 0.0):5.2f} s",
    ]
    accuracy = validation_accuracy(metrics)
    lag = metrics.get("training/policy_lag", 0.0)
    return "  ".join(
        [
            *parts,
            *([f"lag {lag:.0f}"] if lag else []),
            *([f"validation {accuracy:.3f}"] if accuracy is not None else []),
        ]
    )


class Screen:
    """The terminal of one run. Use it as a context manager, so that the bar is taken down whatever happens."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self._task: TaskID | None = None

    def __enter__(self) -> Screen:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def header(self, config: AppConfig, folder: Path) -> None:
        """Say what will run."""
        table = Table.grid(padding=(0, 2))
        for name, value in (*described(config).items(), ("output", str(folder))):
            table.add_row(Text(name, style="bold"), Text(value, style="bold red" if "OFF" in value else ""))
        self._console.print(Panel(table, title="rl-app-ppo", title_align="left", expand=False))

    def note(self, text: str) -> None:
        """One plain line above the bar."""
        self._progress.console.print(Text(text), soft_wrap=True)

    def bar(self, what: str, done: int, total: int) -> None:
        """Show or move the one progress bar."""
        if self._task is None or self._progress.tasks[0].description != what:
            if self._task is not None:
                self._progress.remove_task(self._task)
            self._task = self._progress.add_task(what, total=total)
        self._progress.update(self._task, completed=done, total=total)

    def weights(self, sync: SyncProgress) -> None:
        """The bar of a synchronisation that takes long; the next step puts its own in this place."""
        if sync.phase in PHASES:
            self.bar(f"weights {sync.version}: {sync.phase}", PHASES.index(sync.phase), len(PHASES))

    def clear_bar(self) -> None:
        """Take the bar away."""
        if self._task is not None:
            self._progress.remove_task(self._task)
            self._task = None

    def curve(self, curves: Mapping[str, Sequence[tuple[int, float]]]) -> None:
        """Draw learning curves in the terminal."""
        plotext.clear_figure()
        plotext.theme("clear")
        plotext.plot_size(min(self._console.width, 80), 16)
        for name, points in curves.items():
            if points:
                plotext.plot([s for s, _ in points], [v for _, v in points], label=name)
        plotext.ylim(0, 1)
        plotext.xlabel("step")
        self._console.print(Text.from_ansi(plotext.build()))

    def paths(self, entries: Mapping[str, Path]) -> None:
        """List what was written."""
        for name, path in entries.items():
            self._console.print(Text(f"  {name:<12} {path}"), soft_wrap=True)


class LossNotes(Hook):
    """Hook that says on the screen when a storage unit died with rows."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen

    def on_data_lost(self, step: int, attempt: int, attempts: int) -> None:
        """See Hook."""
        self._screen.note(
            f"a storage unit of the data plane died with rows of step {step}: they are made again, attempt {attempt} of {attempts}"
        )
