"""Generation that runs ahead of training, prompt by prompt, in real processes."""

from __future__ import annotations

import json

import pytest

ASYNC = (
    "async_rl.max_staleness=2",
    "trainer.total_training_steps=4",
    "trainer.test_freq=0",
    "actor.optim.lr=1e-3",
    "trainer.threads_per_worker=1",
)


@pytest.mark.slow
def test_a_deterministic_run_does_not_depend_on_the_number_of_workers(app):
    """Prompts run ahead by two steps; the second run has more workers and another limit."""

    def trained(name, *more):
        done = app(*ASYNC, "trainer.deterministic=true", f"trainer.run_name={name}", *more)
        assert done.code == 0, done.err
        assert "+ 0 dropped + 0 held" in done.out
        folder = done.folder.parent / name
        metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return (folder / "checkpoint" / "model.safetensors").read_bytes(), [m for m in metrics if m["step"]]

    one, metrics = trained("one", "rollout.num_workers=1", "async_rl.max_inflight_prompts=1")
    two, _ = trained("two", "rollout.num_workers=2", "async_rl.max_inflight_prompts=3")
    assert one == two
    name = "training/off_policy/trajectory"
    assert [m[f"{name}_staleness_worst/min"] for m in metrics] == [0, 1, 2, 2]
    assert [m[f"{name}_staleness/max"] for m in metrics] == [0, 1, 2, 2]
    assert {m[f"{name}_spans/max"] for m in metrics} == {1}
    assert [m["async/admitted"] for m in metrics][2:] == [0, 0]
    assert all(m["actor/grad_norm"] > 0 for m in metrics)
