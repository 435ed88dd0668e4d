"""The model of a run that is made longer is that of its last checkpoint, or there is none."""

from __future__ import annotations

import pytest
from empty_checkpoints import save_checkpoints

from rl_app_ppo.config.loading import load_config, to_yaml
from rl_app_ppo.driver.earlier_model import EarlierModel
from rl_app_ppo.inputs.input_files import InputFiles
from rl_app_ppo.outputs.resume import find_start
from rl_app_ppo.outputs.run_folder import RunFiles, publish_folder

STEPS = 4


@pytest.fixture
def run(tmp_path):
    """The folder of a run that has ended after 2 steps; and its configuration with STEPS."""
    files = RunFiles(folder=tmp_path)
    files.checkpoint.mkdir()
    (files.checkpoint / "weights").write_text("of 2 steps")
    config = load_config(["trainer.run_name=r", "trainer.resume_mode=auto", f"trainer.total_training_steps={STEPS}"])
    save_checkpoints(files.checkpoints, [2], to_yaml(config))
    return files, config


def test_a_run_that_is_killed_before_its_model_is_written_has_not_finished(run):
    files, config = run
    EarlierModel(files.checkpoint, STEPS).on_checkpoint_begin(STEPS)
    save_checkpoints(files.checkpoints, [STEPS], to_yaml(config))
    assert not find_start(config, files.folder, InputFiles()).finished


def test_the_earlier_model_stays_until_the_last_checkpoint_begins(run):
    files, _ = run
    hook = EarlierModel(files.checkpoint, STEPS)
    hook.on_checkpoint_begin(3)
    assert (files.checkpoint / "weights").read_text() == "of 2 steps"
    hook.on_checkpoint_begin(STEPS)
    assert not files.checkpoint.exists()
    hook.on_checkpoint_begin(STEPS)  # a second attempt finds no model
    (files.folder / ".checkpoint").mkdir()
    publish_folder(files.folder / ".checkpoint", files.checkpoint)
    assert sorted(path.name for path in files.folder.iterdir()) == ["checkpoint", "checkpoints"]
    assert not list(files.checkpoint.iterdir())
