"""The batch of each step is kept, and trained again it gives the same loss and weights."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from resumable_run import SCENARIOS, Run

from rl_protocol import RLError
from rl_trainer.checkpoints.checkpoint_folder import newest_whole
from rl_trainer.checkpoints.kept_batches import columns_of, kept_steps, read_batch
from rl_trainer.driver.hooks import Hook
from rl_trainer.driver.updates.batch_files import BatchTrainer
from rl_trainer.driver.updates.stages import Updates


def trained_again(model_path, scenario, checkpoint, batches, steps):
    """Train kept batches with fresh models, in their process; returns what came of them."""
    run = Run(model_path, None, steps=6, **SCENARIOS[scenario])
    trainer = BatchTrainer(run.plane, Updates.of(run.parts), 60)

    async def work():
        found = await trainer.train(checkpoint, batches, [read_batch(batches, step) for step in steps])
        assert not any((await run.plane.stats()).rows.values())
        return found

    return asyncio.run(work())


@pytest.mark.parametrize("scenario", ["gae", "lora", "asynchronous"])
def test_batches_that_are_trained_again_give_the_same_loss_and_weights(model_path, tmp_path, scenario):
    """From the checkpoint of step 2 over steps 3 and 4. The dropout of `lora` draws from the random
    state of the process, and `gae` has a critic that trains alone in the first step."""
    checkpoints, batches = tmp_path / "checkpoints", tmp_path / "batches"
    run = Run(model_path, checkpoints, steps=4, save_freq=2, batches=batches, **SCENARIOS[scenario])
    run.fit()
    assert kept_steps(batches) == [1, 2, 3, 4]
    checkpoint, _ = newest_whole(checkpoints, before=4)
    assert checkpoint.manifest.step == 2
    start, *again = trained_again(model_path, scenario, checkpoint, batches, [3, 4])
    assert (start.step, start.weights) == (2, read_batch(batches, 2).weights)
    for step, found in zip((3, 4), again, strict=True):
        kept = read_batch(batches, step)
        assert (found.step, found.metrics, found.weights) == (step, kept.metrics, kept.weights)
        loss = run.metrics[step]["actor/pg_loss"]
        assert found.metrics["actor/pg_loss"] == loss
    assert again[0].weights != again[1].weights
    roles = {"actor/0", "critic/0"} if scenario == "gae" else {"actor/0"}
    assert set(again[0].weights) == roles


def test_rows_in_another_order_give_other_weights(model_path, tmp_path):
    """Mini-batches are made in the order of the rows, so a kept batch must have it."""
    checkpoints, batches = tmp_path / "checkpoints", tmp_path / "batches"
    Run(model_path, checkpoints, steps=2, batches=batches, **SCENARIOS["gae"]).fit()
    checkpoint, _ = newest_whole(checkpoints, before=2)
    kept = read_batch(batches, 2)
    (_, same) = trained_again(model_path, "gae", checkpoint, batches, [2])
    assert same.weights == kept.weights
    # the columns stay where they are, so keys in another order name other rows
    rows = msgspec.structs.replace(kept.rows, tags=kept.rows.tags[::-1], keys=kept.rows.keys[::-1])
    run = Run(model_path, None, steps=2, **SCENARIOS["gae"])
    trainer = BatchTrainer(run.plane, Updates.of(run.parts), 60)
    changed = msgspec.structs.replace(kept, rows=rows)
    (_, other) = asyncio.run(trainer.train(checkpoint, batches, [changed]))
    assert other.weights["critic/0"] != kept.weights["critic/0"]


def test_a_batch_has_every_column_in_the_order_of_training(model_path, tmp_path):
    batches = tmp_path / "batches"
    run = Run(model_path, None, steps=2, batches=batches)
    run.fit()
    kept = read_batch(batches, 2)
    columns = columns_of(batches, kept)
    rows, prompts = columns["rows.safetensors"], columns["prompts.safetensors"]
    assert {"responses", "scores", "advantages", "ref_log_prob", "rollout_log_probs"} <= set(rows.field_names)
    assert len(rows) == len(kept.rows.keys) == len(kept.rows.tags)
    assert [tag["response_len"] for tag in kept.rows.tags] == rows.ragged("responses").lengths.tolist()
    assert prompts.objects("data_source").values() == ["digits"] * len(kept.prompts.keys)
    assert rows.dense("scores").values.mean() == pytest.approx(run.metrics[2]["critic/score/mean"])
    assert (kept.version, kept.step) == (1, 2)


def test_only_the_newest_batches_stay(model_path, tmp_path):
    Run(model_path, None, steps=3, batches=tmp_path, keep_batches=2).fit()
    assert kept_steps(tmp_path) == [2, 3]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000002", "step-000003"]


class _Ends(Hook):
    def on_step_end(self, step, metrics):
        if step == 2:
            raise RLError("killed")


def test_a_resumed_run_replaces_the_batches_of_the_steps_that_it_repeats(model_path, tmp_path):
    checkpoints, batches = tmp_path / "checkpoints", tmp_path / "batches"
    with pytest.raises(RLError, match="killed"):
        Run(model_path, checkpoints, steps=3, save_freq=3, batches=batches, hooks={"ends": _Ends()}).fit()
    before = [read_batch(batches, step) for step in (1, 2)]
    Run(model_path, checkpoints, steps=3, save_freq=3, batches=batches).fit()
    assert [read_batch(batches, step).weights for step in (1, 2)] == [batch.weights for batch in before]
    assert kept_steps(batches) == [1, 2, 3]
