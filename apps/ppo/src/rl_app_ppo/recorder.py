"""What a run leaves behind: its files, its metrics and its curves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rl_app_ppo.config import to_yaml
from rl_app_ppo.console import Screen, step_line, validation_accuracy
from rl_app_ppo.outputs import draw_curve, writing
from rl_app_ppo.resume import CHECKPOINTS, MODEL
from rl_app_ppo.schema import AppConfig
from rl_app_ppo.startup import Startup
from rl_app_ppo.symptoms import Symptoms
from rl_protocol.ports import MetricSink


@dataclass(frozen=True, kw_only=True)
class RunFiles:
    """Paths of one run, all below its folder."""

    folder: Path

    @property
    def config(self) -> Path:
        return self.folder / "config.yaml"

    @property
    def metrics(self) -> Path:
        return self.folder / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.folder / "tensorboard"

    @property
    def curve(self) -> Path:
        return self.folder / "curve.png"

    @property
    def checkpoint(self) -> Path:
        return self.folder / MODEL

    @property
    def checkpoints(self) -> Path:
        return self.folder / CHECKPOINTS

    @property
    def samples(self) -> Path:
        return self.folder / "samples"

    @property
    def profile(self) -> Path:
        return self.folder / "profile"

    @property
    def logs(self) -> Path:
        return self.folder / "logs"

    def written(self) -> dict[str, Path]:
        """What there is for the user to look at, by name."""
        found = {
            "config": self.config,
            "metrics": self.metrics,
            "tensorboard": self.tensorboard,
            "curve": self.curve,
            "samples": self.samples,
            "checkpoint": self.checkpoint,
            "resume from": self.checkpoints,
            "logs": self.logs,
        }
        return {name: path for name, path in found.items() if path.exists()}


def write_config(config: AppConfig, files: RunFiles) -> None:
    """Write the resolved configuration, first of all files."""
    with writing(files.config):
        files.config.write_text(to_yaml(config), encoding="utf-8")
        files.logs.mkdir(exist_ok=True)


class Recorder:
    """Takes the metrics of each step to the sinks and the screen, and keeps the curves."""

    def __init__(
        self,
        screen: Screen,
        sinks: list[MetricSink],
        total: int,
        symptoms: Symptoms,
        startup: Startup,
        *,
        lines: bool = True,
    ) -> None:
        self._screen = screen
        self._lines = lines
        self._sinks = sinks
        self._total = total
        self._symptoms = symptoms
        self._startup: Startup | None = startup
        """None: its metrics are recorded."""
        self.reward: list[tuple[int, float]] = []
        self.validation: list[tuple[int, float]] = []

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record one step; step 0 is the validation before training. The first one carries the times of the start."""
        if self._startup is not None:
            self._startup.end()
            metrics = {**metrics, **self._startup.metrics()}
            self._startup = None
        accuracy = self.remember(step, metrics)
        for sink in self._sinks:
            sink.log(step, metrics)
        if step and self._lines:
            self._screen.note(step_line(step, self._total, metrics))
        elif accuracy is not None and self._lines:
            self._screen.note(f"before training: validation accuracy {accuracy:.3f}")
        self._symptoms.look(step, metrics)
        self._screen.bar("training", step, self._total)

    def remember(self, step: int, metrics: Mapping[str, float]) -> float | None:
        """Add one step to the curves; returns its validation accuracy, if it has one."""
        accuracy = validation_accuracy(metrics)
        if accuracy is not None:
            self.validation.append((step, accuracy))
        if "critic/acc/mean" in metrics:
            self.reward.append((step, metrics["critic/acc/mean"]))
        return accuracy

    def outcome(self) -> str:
        """One line about what was learnt: the accuracy of the first and of the last validation, or of training where there was none."""
        what, curve = ("validation", self.validation) if self.validation else ("training", self.reward)
        failures = self._symptoms.reward_failures
        lost = f"; reward.function failed on {failures} responses" if failures else ""
        if not curve:
            return f"no step was done{lost}"
        (_, first), (step, last) = curve[0], curve[-1]
        line = f"{what} accuracy {first:.3f} -> {last:.3f}"
        if last > first or not step:
            return line + lost
        verdict = "nothing was learnt" if last == first else "it fell"
        advice = (
            "see the warnings above" if self._symptoms.seen else "look at reward.function, actor.optim.lr and samples/"
        )
        return f"{line}: {verdict}; {advice}{lost}"

    @property
    def curves(self) -> dict[str, list[tuple[int, float]]]:
        return {"validation accuracy": self.validation, "training accuracy": self.reward}

    def write_curve(self, path: Path) -> None:
        """Draw what there is of the curves."""
        if self.validation or self.reward:
            draw_curve(path, self.curves, "accuracy")
