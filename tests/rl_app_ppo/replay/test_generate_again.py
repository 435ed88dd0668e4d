"""Which checkpoint a replay without kept batches starts from, and what its run leaves out."""

from __future__ import annotations

import pytest
from empty_checkpoints import save_checkpoints

from rl_app_ppo.config.loading import load_config, to_yaml
from rl_app_ppo.outputs.resume import changes
from rl_app_ppo.replay.generate_again import replayed
from rl_trainer.checkpoints.checkpoint_folder import newest_whole, step_name


@pytest.fixture
def checkpoints(tmp_path):
    """Those of the steps 2, 4 and 6; that of step 4 is damaged."""
    save_checkpoints(tmp_path, (2, 4, 6), to_yaml(load_config([])))
    (tmp_path / step_name(4) / "trainer.json").write_text("{")
    return tmp_path


@pytest.mark.parametrize(("step", "before"), [(1, None), (2, None), (3, 2), (5, 2), (6, 2), (7, 6)])
def test_a_replay_starts_from_the_newest_whole_checkpoint_before_the_step(checkpoints, step, before):
    found, _ = newest_whole(checkpoints, before=step)
    assert (found.manifest.step if found is not None else None) == before
    journal = ["transfer_queue.durability=commit", "transfer_queue.journal_dir=/x", "transfer_queue.verify=true"]
    given = load_config(["trainer.save_freq=5", *journal, "trainer.keep_batches=3"])
    config = replayed(given, found, step, checkpoints)
    assert config.trainer.resume_mode == ("disable" if before is None else str(checkpoints / step_name(before)))
    assert (config.trainer.total_training_steps, config.trainer.save_freq) == (step, 0)
    assert (config.transfer_queue.durability, config.trainer.keep_batches) == ("off", 0)


@pytest.mark.parametrize(
    ("more", "test_freq"),
    [([], 1 << 31), (["data.val_files=val.jsonl"], 0), (["data.val_split=0"], 0), (["trainer.test_freq=0"], 0)],
)
def test_a_replay_trains_on_the_rows_that_the_run_has_not_held_out(tmp_path, more, test_freq):
    data = ["preset=none", "model.path=model", "data.train_files=train.jsonl", "reward.function=exact_match"]
    given = load_config([*data, "trainer.test_freq=5", *more])
    save_checkpoints(tmp_path, (2,), to_yaml(given))
    found, _ = newest_whole(tmp_path)
    config = replayed(given, found, 3, tmp_path)
    assert config.holds_out == given.holds_out == bool(test_freq)
    assert config.trainer.test_freq == test_freq
    changes(found, config)  # raises if the replay could not resume
