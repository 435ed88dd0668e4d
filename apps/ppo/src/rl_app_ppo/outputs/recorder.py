"""Record the metrics of each step, and draw the learning curves."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rl_app_ppo.outputs.console import Screen, accuracy_range, step_line, validation_accuracy
from rl_app_ppo.outputs.run_folder import writing
from rl_app_ppo.outputs.run_record import RunRecord
from rl_app_ppo.outputs.startup_times import Startup
from rl_app_ppo.outputs.training_warnings import TrainingWarnings
from rl_protocol.counted import counted
from rl_protocol.ports import MetricSink


class Recorder:
    """Sends the metrics of each step to the sinks and the screen, and keeps the curves."""

    def __init__(
        self,
        screen: Screen,
        sinks: list[MetricSink],
        total: int,
        warnings: TrainingWarnings,
        startup: Startup,
        *,
        lines: bool = True,
        record: RunRecord | None = None,
    ) -> None:
        self._record = record
        self._screen = screen
        self._lines = lines
        self._sinks = sinks
        self._total = total
        self._warnings = warnings
        self._startup: Startup | None = startup
        """None: the first training step is done."""
        self._first = True
        self._done = 0
        """Training steps of this process."""
        self._after_first: tuple[int, float] | None = None
        """The first step of this process, and the time of its end."""
        self.reward: list[tuple[int, float]] = []
        self.validation: list[tuple[int, float]] = []
        self._filtered = False
        """Whether `reward` is of the prompts that dynamic sampling kept, whose responses differ in
        their scores: it does not tell what was learned."""
        self.problems: dict[str, int] = {}
        """Problems of a point of the curves "validation" and "training"; absent: not known."""

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record one step; step 0 is the validation before training.

        The first one also has the times of the start, and the first training step the time from the
        command to its end.
        """
        if self._startup is not None:
            metrics = {**metrics, **self._start_times(self._startup, step)}
        accuracy = self.remember(step, metrics)
        for sink in self._sinks:
            sink.log(step, metrics)
        if step and self._lines:
            self._screen.note(step_line(step, self._total, metrics, self._left_s(step)))
        elif accuracy is not None and self._lines:
            self._screen.note(f"before training: validation accuracy {accuracy:.3f}")
        self._done += step > 0
        if self._record is not None:
            self._record.step_done(step)
        self._warnings.look(step, metrics)
        self._screen.bar("training", step, self._total)

    def _left_s(self, step: int) -> float | None:
        """Seconds that the other steps take, at the mean pace so far; the first step counts not."""
        now = time.perf_counter()
        if self._after_first is None:
            self._after_first = step, now
            return None
        first, ended = self._after_first
        return (now - ended) / max(step - first, 1) * (self._total - step)

    def _start_times(self, startup: Startup, step: int) -> dict[str, float]:
        startup.end()
        times = startup.metrics() if self._first else {}
        if self._first and self._record is not None:
            self._record.phases(startup.phases)
        self._first = False
        if step:
            metric, line = startup.first_step()
            self._startup = None
            times |= metric
            if self._lines:
                self._screen.note(line)
        return times

    def remember(self, step: int, metrics: Mapping[str, float]) -> float | None:
        """Add one step to the curves; returns its validation accuracy, or None."""
        accuracy = validation_accuracy(metrics)
        if accuracy is not None:
            self.validation.append((step, accuracy))
        if "critic/acc/mean" in metrics:
            self.reward.append((step, metrics["critic/acc/mean"]))
            self._filtered = "training/filter_groups/prompts_kept" in metrics
        return accuracy

    def outcome(self) -> str:
        """One line with the first and last accuracy, of validation if there were two of them."""
        failures = self._warnings.reward_failures
        lost = f"; reward.function failed on {counted(failures, 'response')}" if failures else ""
        validated = len(self.validation) > 1
        curve, of = (self.validation, "validation") if validated else (self.reward, "training")
        label = f"{of} accuracy"
        if self._filtered and not validated:
            label += " of the prompts that filter_groups kept"
        after = f"validation accuracy {self.validation[-1][1]:.3f}" if len(self.validation) == 1 else ""
        if len(curve) < 2:
            one = f"{label} {curve[0][1]:.3f}" if curve else ""
            steps = f"{counted(self._done, 'step')} done" if self._done else "no step was done"
            return (", ".join(filter(None, (one, after))) or steps) + lost
        (_, first), (_, last) = curve[0], curve[-1]
        line = ", ".join(filter(None, (f"{label} {first:.3f} -> {last:.3f}", after)))
        if last > first or (self._filtered and not validated):
            return line + lost
        if last == first == 1.0:
            return f"{line}: every answer was right before training, too{lost}"
        verdict = "nothing was learned" if last == first else _fall(first, last, self.problems.get(of, 0))
        advice = (
            "see the warnings above" if self._warnings.seen else "look at reward.function, actor.optim.lr and samples/"
        )
        return f"{line}: {verdict}; {advice}{lost}"

    @property
    def curves(self) -> dict[str, list[tuple[int, float]]]:
        return {"validation accuracy": self.validation, "training accuracy": self.reward}

    def write_curve(self, path: Path) -> None:
        """Draw the curves that have points."""
        if self.validation or self.reward:
            draw_curve(path, self.curves)


def _fall(first: float, last: float, problems: int) -> str:
    """The word for a fall; chance explains one of up to two standard errors of two samples."""
    variance = sum(max(p * (1 - p), 0.0) for p in (first, last))
    if problems and (first - last) ** 2 <= 4 * variance / problems:
        return f"no clear change with {counted(problems, 'problem')}"
    return "it fell"


def draw_curve(path: Path, curves: Mapping[str, Sequence[tuple[int, float]]]) -> None:
    """Draw the accuracy as a PNG; each curve is a sequence of (step, value)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # takes half a second to import
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for name, points in curves.items():
        axes.plot([step for step, _ in points], [value for _, value in points], marker=".", label=name)
    axes.set(xlabel="step", title="accuracy", ylim=accuracy_range(curves))
    axes.grid(alpha=0.3)
    axes.legend()
    with writing(path):
        figure.savefig(path, dpi=120)
