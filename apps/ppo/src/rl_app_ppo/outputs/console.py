"""The terminal: header, a line per step, panel, progress bar, curve. Nothing else prints."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import plotext
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from rl_app_ppo.outputs.answers import Answers, one_line
from rl_ckpt_engine.sync.progress import PHASES, SyncProgress
from rl_protocol.ports import GroupFailure
from rl_trainer import Hook
from rl_trainer.algorithms.old_log_prob import GAP, STALENESS

ACCURACY = "acc/mean@"
COLUMNS = 100
"""Longest line of a step."""
REFRESH = 4.0
"""How often a second panel and progress bar are drawn."""
SPARE = ("len", "ent", "stages", "kl", "lag")
"""Parts that a line leaves out if it is too long, the first ones first."""


THROUGHPUT = "perf/throughput"
_STAGE = "timing_s/"
_NO_STAGE = ("timing_s/step", "timing_s/testing", "timing_s/save_checkpoint")
_SHORT = {"update_actor": "update", "update_critic": "critic", "update_weights": "sync", "old_log_prob": "old"}
"""Names of stages in the line of a step."""
_SHOWN = 0.05
"""Least share of a stage in the line of a step."""


def stage_shares(metrics: Mapping[str, float]) -> list[tuple[str, float]]:
    """(stage, share in the time of the step), the longest first. Stages may run side by side."""
    whole = metrics.get("timing_s/step", 0.0)
    times = {name.removeprefix(_STAGE): value for name, value in metrics.items() if name.startswith(_STAGE)}
    stages = {name: value for name, value in times.items() if _STAGE + name not in _NO_STAGE}
    return sorted(((name, value / whole) for name, value in stages.items()), key=lambda one: -one[1]) if whole else []


def validation_accuracy(metrics: Mapping[str, float]) -> float | None:
    """Mean of the val-core accuracies; None if the metrics have none."""
    found = [value for name, value in metrics.items() if name.startswith("val-core/") and ACCURACY in name]
    return sum(found) / len(found) if found else None


def step_line(step: int, total: int, metrics: Mapping[str, float], left_s: float | None = None) -> str:
    """One line about one step, of at most COLUMNS.

    `kl` is the divergence from the reference, nats per token; absent without a reference. `ent`,
    the entropy, is absent where no pass computed it: the critic warms up, and old log-probs are the
    engine's. `ce` is the cross-entropy of the data's answers, nats per token; where these are all
    that is trained on, there is no reward and no `len`. After the seconds of the step come its
    tokens per second and the shares of its two longest stages. If the line is too long, it leaves
    out the first ones of SPARE.

    Args:
        step: number of the step.
        total: steps of the run.
        metrics: of the step.
        left_s: seconds that the rest of the run takes; None: not known.
    """
    named = ("actor/ref_kl", "actor/reward_kl_penalty", "actor/kl_loss")
    kl = next((metrics[name] for name in named if name in metrics), None)
    accuracy, lag = validation_accuracy(metrics), metrics.get(STALENESS, 0.0)
    parts = {
        "step": f"step {step:>{len(str(total))}}/{total}",
        "reward": _part("reward", metrics, "critic/score/mean", "6.3f"),
        "acc": _part("acc", metrics, "critic/acc/mean", ".3f"),
        "ce": _part("ce", metrics, "actor/ce_loss", ".4f"),
        "len": _part("len", metrics, "response_length/mean", "5.1f"),
        "kl": "" if kl is None else f"kl {kl:z.4f}",
        "ent": _part("ent", metrics, "actor/entropy", ".3f"),
        "s": f"{metrics.get('timing_s/step', 0.0):5.2f} s",
        "tokens": f"{metrics[THROUGHPUT]:.0f} tok/s" if THROUGHPUT in metrics else "",
        "stages": " ".join(
            f"{_SHORT.get(name, name)} {share:.0%}" for name, share in stage_shares(metrics)[:2] if share >= _SHOWN
        ),
        "left": "" if left_s is None else f"left {clock(left_s)}",
        "lag": f"lag {lag:.0f}" if lag else "",
        "val": "" if accuracy is None else f"val {accuracy:.3f}",
    }
    spare = iter(SPARE)
    while len(line := "  ".join(filter(None, parts.values()))) > COLUMNS and (name := next(spare, "")):
        del parts[name]
    return line


def _part(label: str, metrics: Mapping[str, float], name: str, spec: str) -> str:
    """One value of a step's line; empty if the step has no such metric."""
    return f"{label} {metrics[name]:{spec}}" if name in metrics else ""


def clock(seconds: float) -> str:
    """Hours, minutes and seconds: 1:02:03, or 2:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class Screen:
    """The terminal of one run: lines that stay, and a panel and a progress bar below them.

    A context manager that removes panel and bar at the end. Threads may call it if the console is a
    RunConsole.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
        )
        self._task: TaskID | None = None
        self._panel: RenderableType | None = None
        self._live = Live(
            console=console,
            get_renderable=self._moving,
            auto_refresh=False,  # rich's thread would draw while another one is about to print
            transient=True,
        )
        self._ended = threading.Event()
        self._refresher = threading.Thread(target=self._refresh, name="screen", daemon=True)

    def __enter__(self) -> Screen:
        with self._console:
            self._live.start()
        if self.size is not None:
            self._refresher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._refresher.is_alive():
            self._refresher.join()
        self._panel = None
        with self._console:
            self._live.stop()

    def _refresh(self) -> None:
        while not self._ended.wait(1 / REFRESH):
            with self._console:
                self._live.refresh()

    @property
    def size(self) -> tuple[int, int] | None:
        """Columns and rows; None: it is a file, a pipe or a terminal that can't move its cursor."""
        out = self._console
        moves = out.is_terminal and not out.is_dumb_terminal and not out.quiet
        return (out.width, out.height) if moves else None

    def panel(self, panel: RenderableType | None) -> None:
        """Show this below the lines from the next refresh on; None: nothing."""
        self._panel = panel

    def _moving(self) -> RenderableType:
        return self._progress if self._panel is None else Group(self._panel, self._progress)

    def header(self, lines: Mapping[str, str], folder: Path) -> None:
        """Print the banner: title -> text of each line, and the run folder."""
        table = Table.grid(padding=(0, 2))
        table.add_column()
        table.add_column(overflow="fold")  # a path is whole on a narrow terminal
        for name, value in (*lines.items(), ("output", str(folder))):
            table.add_row(Text(name, style="bold"), Text(value, style="bold red" if "OFF" in value else ""))
        self._console.print(Panel(table, title="rl-app-ppo", title_align="left", expand=False))

    def note(self, text: str) -> None:
        """Print one line above panel and bar."""
        self._console.print(Text(text), soft_wrap=True)

    def bar(self, what: str, done: int, total: int) -> None:
        """Show or update the progress bar."""
        if self._task is None or self._progress.tasks[0].description != what:
            if self._task is not None:
                self._progress.remove_task(self._task)
            self._task = self._progress.add_task(what, total=total)
        self._progress.update(self._task, completed=done, total=total)

    def weights(self, sync: SyncProgress) -> None:
        """Show the progress of a slow weight synchronization; the next step replaces the bar."""
        if sync.phase in PHASES:
            self.bar(f"weights {sync.version}: {sync.phase}", PHASES.index(sync.phase), len(PHASES))

    def clear_bar(self) -> None:
        """Remove the bar."""
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
        plotext.ylim(*accuracy_range(curves))  # plotext fails if a curve has no point inside
        steps = sorted({step for points in curves.values() for step, _ in points})
        if len(steps) == 1:  # plotext would choose an axis with fractions of steps
            plotext.xticks(steps)
        plotext.xlabel("step")
        self._console.print(Text.from_ansi(plotext.build()))

    def answers(self, answers: Answers) -> None:
        """Print answers to validation prompts before and after training."""
        before, after = answers.steps
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_row("  validation prompt", f"step {before}", "", f"step {after}")
        for row in answers.rows:
            cells = [f"  {one_line(row.prompt, 40)}"]
            for text, right in (row.before, row.after):
                cells += [one_line(text, 20), "right" if right else "wrong"]
            table.add_row(*map(Text, cells))
        self._console.print(table)
        if answers.note:
            self._console.print(Text(f"  {answers.note}"), soft_wrap=True)

    def paths(self, entries: Mapping[str, Path]) -> None:
        """List the files of the run."""
        for name, path in entries.items():
            self._console.print(Text(f"  {name:<12} {path}"), soft_wrap=True)


def accuracy_range(curves: Mapping[str, Sequence[tuple[int, float]]]) -> tuple[float, float]:
    """Lowest and highest value of a drawing: 0 and 1, unless a reward counts as the accuracy."""
    values = [value for points in curves.values() for _, value in points]
    return min([0, *values]), max([1, *values])


class OldLogProbNotes(Hook):
    """Hook that reports when algorithm.old_log_prob=auto changes what it does, and why.

    Args:
        say: prints one line.
        tolerance: algorithm.old_log_prob_tolerance, nats.
    """

    def __init__(self, say: Callable[[str], None], tolerance: float) -> None:
        self._say = say
        self._tolerance = tolerance
        self._said = ""

    def on_step_end(self, step: int, metrics: Mapping[str, float]) -> None:
        if GAP not in metrics:
            return
        gap, lag = metrics[GAP], metrics.get(STALENESS, 0.0)
        if lag:
            what, text = (
                "lag",
                f"rows are from older weights ({STALENESS} {lag:.0f}): old log-probs are recomputed",
            )
        elif gap <= self._tolerance:
            what = "agree"
            text = f"log-probs of rollout engine and actor agree (mean difference {gap:.1g} nats): old log-probs are the engine's"
        else:
            what = "differ"
            text = (
                f"log-probs of rollout engine and actor differ by {gap:.2g} nats on average, more than "
                f"algorithm.old_log_prob_tolerance={self._tolerance:g}: old log-probs are recomputed"
            )
        if what != self._said:
            self._said = what
            self._say(f"step {step}: {text}")


class LossNotes(Hook):
    """Hook that reports lost storage units and failed rollouts on the screen."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen

    def on_data_lost(self, step: int, attempt: int, attempts: int) -> None:
        self._screen.note(
            f"a storage unit of the data plane died with rows of step {step}: they are generated again, attempt {attempt} of {attempts}"
        )

    def on_rollout_failure(self, step: int, failures: Sequence[GroupFailure], replaced: int) -> None:
        outcomes = Counter(failure.outcome for failure in failures)
        parts = {
            "rolled out again": outcomes["retried"],
            "trained with fewer responses": outcomes["partial"],
            "replaced by another prompt": replaced,
        }
        done = ", ".join(f"{count} {what}" for what, count in parts.items() if count)
        last = failures[-1]
        self._screen.note(
            f"step {step}: {sum(failure.sessions for failure in failures)} rollouts failed, prompts: {done}. "
            f"The last, {last.uid}: {last.reason}"
        )
