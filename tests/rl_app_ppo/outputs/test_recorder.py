"""The recorder's outcome line, its first line of metrics, and the curve."""

from __future__ import annotations

import pytest
from rich.console import Console

from rl_app_ppo.outputs.console import Screen, accuracy_range
from rl_app_ppo.outputs.recorder import Recorder, draw_curve
from rl_app_ppo.outputs.startup_times import Startup
from rl_app_ppo.outputs.training_warnings import TrainingWarnings


@pytest.mark.parametrize(
    ("accuracies", "failures", "words"),
    [
        ([0.25, 0.75], 0, "validation accuracy 0.250 -> 0.750"),
        ([0.25, 0.75], 3, "validation accuracy 0.250 -> 0.750; reward.function failed on 3 responses"),
        ([0.0, 0.0], 0, "0.000 -> 0.000: nothing was learned; look at reward.function, actor.optim.lr and samples/"),
        ([0.0, 0.0], 3, "nothing was learned; see the warnings above; reward.function failed on 3 responses"),
        ([1.0, 1.0], 0, "1.000 -> 1.000: every answer was right before training, too"),
        ([0.5, 0.25], 0, "0.500 -> 0.250: it fell; look at"),
        ([], 0, "no step was done"),
    ],
)
def test_the_last_line_says_where_nothing_was_learnt(accuracies, failures, words, tmp_path):
    recorder, warnings = _recorder(tmp_path, [])
    for step, accuracy in enumerate(accuracies):
        recorder.on_step(step, {"val-core/x/acc/mean@1": accuracy})
    if failures:
        warnings.reward_failed(1, failures, 8, "raised")
    assert words in recorder.outcome()


@pytest.mark.parametrize(
    ("accuracies", "problems", "verdict"),
    [
        ((0.562, 0.547), 64, "no clear change with 64 problems; look at"),
        ((0.562, 0.547), 100_000, "it fell; look at"),
        ((1.0, 0.5), 64, "it fell; look at"),
        ((1.0, 0.0), 1, "it fell; look at"),
        ((0.562, 0.562), 64, "nothing was learned; look at"),
    ],
)
def test_a_fall_that_chance_explains_is_not_called_one(accuracies, problems, verdict, tmp_path):
    recorder, _ = _recorder(tmp_path, [])
    recorder.problems = {"validation": problems}
    for step, accuracy in enumerate(accuracies):
        recorder.on_step(step, {"val-core/x/acc/mean@1": accuracy})
    assert f": {verdict}" in recorder.outcome()


@pytest.mark.parametrize(("steps", "words"), [(1, "1 step done"), (3, "3 steps done")])
def test_steps_without_an_accuracy_are_counted(steps, words, tmp_path):
    """As of supervised training without validation, or if every call of the reward failed."""
    recorder, _ = _recorder(tmp_path, [])
    for step in range(1, steps + 1):
        recorder.on_step(step, {"actor/ce_loss": 1.0})
    assert recorder.outcome() == words


def test_without_validation_the_outcome_is_that_of_training(tmp_path):
    recorder, _ = _recorder(tmp_path, [])
    for step, accuracy in ((1, 0.25), (2, 0.5)):
        recorder.on_step(step, {"critic/acc/mean": accuracy})
    assert recorder.outcome() == "training accuracy 0.250 -> 0.500"


@pytest.mark.parametrize(
    ("training", "validation", "words"),
    [
        ([0.25], [], "training accuracy 0.250"),
        ([0.25, 0.5], [0.75], "training accuracy 0.250 -> 0.500, validation accuracy 0.750"),
        ([0.25], [0.75], "training accuracy 0.250, validation accuracy 0.750"),
        ([], [0.75], "validation accuracy 0.750"),
    ],
)
def test_one_accuracy_is_compared_with_nothing(training, validation, words, tmp_path):
    recorder, _ = _recorder(tmp_path, [])
    for step, accuracy in enumerate(training, 1):
        recorder.on_step(step, {"critic/acc/mean": accuracy})
    for accuracy in validation:
        recorder.remember(len(training), {"val-core/x/acc/mean@1": accuracy})
    assert recorder.outcome() == words


def test_the_accuracy_of_kept_prompts_says_so_and_is_not_judged(tmp_path):
    recorder, _ = _recorder(tmp_path, [])
    kept = "training accuracy of the prompts that filter_groups kept"
    for step, accuracy in ((1, 0.5), (2, 0.45)):
        recorder.on_step(step, {"critic/acc/mean": accuracy, "training/filter_groups/prompts_kept": 8.0})
        assert recorder.outcome() == (f"{kept} 0.500" if step == 1 else f"{kept} 0.500 -> 0.450")
    for step in (2, 3):
        recorder.remember(step, {"val-core/x/acc/mean@1": 0.25})
    assert recorder.outcome().startswith("validation accuracy 0.250 -> 0.250: nothing was learned")


class Sink:
    def __init__(self):
        self.lines = []

    def log(self, step, metrics):
        self.lines.append((step, dict(metrics)))


def _recorder(tmp_path, sinks):
    screen = Screen(Console(quiet=True))
    warnings = TrainingWarnings(screen.note, tools=False, reward_log=tmp_path / "reward.log")
    startup = Startup(lambda _: None)
    with startup.phase("ray", "starting Ray"):
        pass
    return Recorder(screen, sinks, 5, warnings, startup), warnings


def test_the_first_lines_of_metrics_hold_the_times_of_the_start_and_no_other_does(tmp_path):
    sink = Sink()
    recorder, _ = _recorder(tmp_path, [sink])
    for step in range(3):
        recorder.on_step(step, {"a": 1.0})
    (_, validation), (_, first), second = sink.lines
    assert validation.keys() == {"a", "startup_s/ray", "startup_s/total"}
    assert first.keys() == {"a", "startup_s/first_step"}
    assert 0 <= validation["startup_s/ray"] <= validation["startup_s/total"] <= first["startup_s/first_step"]
    assert second == (2, {"a": 1.0})


def test_without_a_validation_the_first_step_holds_all_times_of_the_start(tmp_path):
    sink = Sink()
    recorder, _ = _recorder(tmp_path, [sink])
    recorder.on_step(3, {})
    ((_, first),) = sink.lines
    assert first.keys() == {"startup_s/ray", "startup_s/total", "startup_s/first_step"}


def test_the_curve_is_a_png(tmp_path):
    draw_curve(tmp_path / "c.png", {"accuracy": [(0, 0.3), (5, 0.9)]})
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("values", "drawn"), [((0.3, 0.9), (0, 1)), ((2.0, 9.5), (0, 9.5)), ((-1.0, 0.5), (-1, 1)), ((), (0, 1))]
)
def test_the_curve_shows_a_reward_that_counts_as_accuracy(values, drawn):
    assert accuracy_range({"training accuracy": list(enumerate(values)), "validation accuracy": []}) == drawn


def test_the_drawing_has_the_range_of_the_curve(monkeypatch, tmp_path):
    drawn = []
    monkeypatch.setattr("matplotlib.axes.Axes.set", lambda self, **given: drawn.append(given["ylim"]))
    draw_curve(tmp_path / "c.png", {"accuracy": [(0, -2.0), (5, 9.5)]})
    assert drawn == [(-2.0, 9.5)]
