"""What is trained again, and what its comparison says."""

from __future__ import annotations

import pytest
from empty_checkpoints import save_checkpoints
from kept_runs import keep_run

from rl_app_ppo.config.loading import load_config, to_yaml
from rl_app_ppo.replay.train_again import TrainAgain, compared, plan
from rl_protocol import ConfigError
from rl_trainer.checkpoints.kept_batches import publish, read_batch
from rl_trainer.driver.updates.batch_files import Retrained


@pytest.mark.parametrize(("step", "after", "steps"), [(1, 0, [1]), (2, 0, [1, 2]), (3, 2, [3]), (4, 2, [3, 4])])
def test_the_batches_after_the_checkpoint_are_trained_again(tmp_path, step, after, steps):
    files = keep_run(tmp_path, {one: [float(one)] for one in (1, 2, 3, 4)})
    save_checkpoints(files.checkpoints, (2,), to_yaml(load_config([])))
    found = plan(files, step)
    assert isinstance(found, TrainAgain)
    assert (found.before.manifest.step if found.before is not None else 0) == after
    assert [batch.step for batch in found.batches] == steps


@pytest.mark.parametrize("resumed", [False, True])
def test_a_run_from_a_checkpoint_of_another_is_trained_again_from_it(tmp_path, resumed):
    save_checkpoints(tmp_path / "other", (2,), to_yaml(load_config([])))
    origin = tmp_path / "other" / "step-000002"
    files = keep_run(tmp_path / "run", {3: [3.0], 4: [4.0]}, f"trainer.resume_mode={origin}")
    if resumed:
        files.config.write_text(to_yaml(load_config(["trainer.resume_mode=auto", "trainer.run_name=run"])))
    found = plan(files, 4)
    assert isinstance(found, TrainAgain)
    assert found.before is not None
    assert found.before.folder == origin
    assert [batch.step for batch in found.batches] == [3, 4]
    (origin / "trainer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"has started from .*step-000002 .*, which can't be used: trainer\.json has"):
        plan(files, 4)


def test_steps_that_are_not_kept_are_named(tmp_path):
    files = keep_run(tmp_path, {1: [1.0], 3: [3.0]})
    assert plan(files, 3) == [2]


def test_a_step_has_the_settings_it_was_trained_with(tmp_path):
    files = keep_run(tmp_path, {1: [1.0], 2: [2.0]})
    again = to_yaml(load_config(["actor.optim.lr=0.5", "trainer.total_training_steps=7"]))
    (files.batches / "step-000002").rename(files.batches / ".saving-step-000002")
    publish(files.batches, read_batch(keep_run(tmp_path / "b", {1: [1.0], 2: [2.0]}).batches, 2), again, -1)
    with pytest.raises(ConfigError, match=r"actor.optim.lr was .* in step 1 and is 0.5 in step 2"):
        plan(files, 2)
    save_checkpoints(files.checkpoints, (1,), to_yaml(load_config([])))
    assert plan(files, 2).config.actor.optim.lr == 0.5


def test_a_loss_of_the_metrics_file_and_the_weights_of_each_step_are_compared(tmp_path):
    files = keep_run(tmp_path, {1: [1.0], 2: [2.0]})
    batches = [read_batch(files.batches, step) for step in (1, 2)]
    start = Retrained(step=0, metrics={}, weights={"actor/0": "x"})
    same = [Retrained(step=batch.step, metrics=batch.metrics, weights=batch.weights) for batch in batches]
    metrics = {1: {"actor/pg_loss": 1.0}}  # killed before the line of step 2
    found = compared(batches, metrics, [start, *same])
    assert (found.equal, found.weights, found.metrics) == (True, True, 1)
    found = compared(batches, {1: {"actor/pg_loss": 1.5}}, [start, *same])
    assert [str(line) for line in found.differences] == ["step 1: actor/pg_loss: 1.5, and 1.0"]
    other = Retrained(step=2, metrics=same[1].metrics, weights={"actor/0": "y"})
    found = compared(batches, metrics, [start, same[0], other])
    assert (found.equal, found.weights) == (False, False)
    assert found.differences[0].name == "weights of actor/0"
