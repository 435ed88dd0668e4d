"""The app on one real GPU, which the trained models and the rollout of a process share."""

from __future__ import annotations

import pytest
import torch

from rl_app_ppo.worker.update_meter import peak_flops

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(500)]


@pytest.fixture(autouse=True)
def gpu():
    if not torch.cuda.is_available():
        pytest.skip("torch finds no GPU")


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["actor.use_kl_loss=true", "torch.param_dtype=bfloat16"],
        ["lora.rank=4"],
        ["algorithm=ppo"],
        ["model_engine=fsdp"],
        ["trainer.deterministic=true", "trainer.threads_per_worker=1"],
    ],
    ids=["grpo", "reference in bfloat16", "lora", "ppo", "fsdp", "deterministic"],
)
def test_a_run_trains_and_generates_on_the_gpu(app, overrides):
    done = app("trainer.total_training_steps=3", "trainer.test_freq=0", "placement=fused", *overrides)
    assert done.code == 0, done.err
    assert "GPUs: 1 of" in done.out
    trained = done.metrics[1:]
    assert [m["weight_sync/version"] for m in trained] == [1, 2, 3]
    assert all(m["actor/grad_norm"] > 0 and m["actor/skipped_steps"] == 0 for m in trained)
    assert all(m["perf/max_memory_reserved_gb"] >= m["perf/max_memory_allocated_gb"] > 0 for m in trained)
    if peak_flops(torch.cuda.get_device_name()) is not None:
        assert all(0 < m["perf/mfu/actor"] < 1 for m in trained)
    rounding = 0.1 if "torch.param_dtype=bfloat16" in overrides else 1e-3
    assert max(m["training/rollout_log_probs_diff_max"] for m in trained) < rounding
    (log,) = (done.folder / "logs").glob("actor*.log")
    assert "finds no GPU" not in log.read_text()


def test_a_run_resumes_on_the_gpu_what_the_cpu_began_and_the_other_way_round(app):
    def run(device, *more):
        steps = ("trainer.test_freq=0", "trainer.save_freq=1", "placement=fused")
        return app(*steps, f"torch.device={device}", f"rollout.device={device}", *more)

    begun = run("cpu", "trainer.total_training_steps=1", "trainer.run_name=begun")
    assert begun.code == 0, begun.err
    for steps, device in ((2, "cuda"), (3, "cpu")):
        done = run(
            device, "trainer.run_name=begun", "trainer.resume_mode=auto", f"trainer.total_training_steps={steps}"
        )
        assert done.code == 0, done.err
        assert done.metrics[-1]["step"] == steps
