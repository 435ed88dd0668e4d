"""What hooks receive, in which order, and what happens when one fails."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
from resumable_run import Run

from rl_protocol import ConfigError, RLError
from rl_trainer import Hook
from rl_trainer.driver.hooks import named_hooks


class Diary(Hook):
    def __init__(self):
        self.lines = []

    def on_train_begin(self, step):
        self.lines.append(f"train {step}")

    def on_train_end(self, step):
        self.lines.append(f"end {step}")

    def on_step_begin(self, step):
        self.lines.append(f"step {step}")

    def on_step_end(self, step, metrics):
        self.lines.append(f"step end {step} {int(metrics['training/global_step'])}")

    def on_sample_begin(self, step, num_prompts):
        self.lines.append(f"sample {num_prompts}")

    def on_sample_end(self, step, rows):
        self.lines.append(f"samples {len(rows)} of version {rows.tag_values('version')[0]}")

    def on_validate_begin(self, step):
        self.lines.append(f"validate {step}")

    def on_validate_end(self, step, metrics):
        self.lines.append(f"validated {next(iter(metrics))}")

    def on_checkpoint_begin(self, step):
        self.lines.append(f"save {step}")

    def on_checkpoint_end(self, step, folder):
        self.lines.append(f"saved {step} {(folder / 'manifest.json').exists()}")


def test_every_begin_has_its_end_in_order(model_path, tmp_path):
    diary = Diary()
    Run(model_path, tmp_path, steps=1, hooks={"diary": diary}).fit()
    assert diary.lines == [
        "train 0",
        "validate 0",
        "validated val-core/digits/acc/mean@1",
        "step 1",
        "sample 4",
        "samples 16 of version 0",
        "validate 1",
        "validated val-core/digits/acc/mean@1",
        "save 1",
        "step end 1 1",
        "saved 1 True",
        "end 1",
    ]
    again = Diary()
    Run(model_path, tmp_path, steps=1, hooks={"diary": again}).fit()
    assert again.lines == ["train 1", "end 1"]


def test_a_hook_that_fails_ends_the_run_and_is_named(model_path):
    class Broken(Hook):
        def on_step_begin(self, step):
            raise KeyError("oops")

    with pytest.raises(
        RLError,
        match=r"The hook 'mine' \(.*Broken\) failed in on_step_begin: KeyError: 'oops' \(.*test_hooks\.py:\d+\)\. .*TrainerParts\.hooks",
    ):
        Run(model_path, None, steps=1, hooks={"mine": Broken()}).fit()


def test_hooks_are_those_of_installed_and_allowed_packages(install_plugins, monkeypatch):
    install_plugins("rl_trainer.hooks", **{name: f"someones:{name}" for name in ("a", "b", "wrong")})
    install_plugins("rl_trainer.hooks", allowed=False, c="someones:c")
    module = SimpleNamespace(a=Diary(), b=Hook(), wrong=Diary)
    monkeypatch.setitem(sys.modules, "someones", module)
    assert [*named_hooks(["b", "a", "b"])] == ["b", "a"]
    assert named_hooks(["a"])["a"] is module.a
    assert named_hooks([]) == {}
    with pytest.raises(
        ConfigError,
        match=r"TrainerParts\.hooks='wrong': someones:wrong must be of type Hook; got type\. .* NAME = Diary\(\)",
    ):
        named_hooks(["wrong"])
    with pytest.raises(ConfigError, match=r"TrainerParts\.hooks='c': .* is installed but not allowed"):
        named_hooks(["a", "c"])
    with pytest.raises(ConfigError, match=r"TrainerParts\.hooks must be one of a, b, c, wrong; got 'os\.system'"):
        named_hooks(["os.system"])
