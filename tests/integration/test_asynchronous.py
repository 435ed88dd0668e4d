"""Generation that runs ahead of training, prompt by prompt, in real processes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import re
import shutil
import signal
import threading
import time

import psutil
import pytest
from app_runs import marked, name_of, processes_of, started, words_of

from rl_trainer.checkpoints.checkpoint_folder import newest_whole, step_name

ASYNC = (
    "async_rl.max_staleness=2",
    "trainer.total_training_steps=4",
    "trainer.test_freq=2",
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
    assert any(m["actor/grad_norm"] > 0 for m in metrics), "equal parameters mean nothing if none has changed"


LONG = (
    "rollout.temperature=5",  # hardly ever the end of the sequence
    "rollout.response_length=48",
    "rollout.max_batch_size=2",  # generation takes longer than training, so updates find it running
    "rollout.num_workers=1",
    "trainer.val_before_train=false",
)


@pytest.mark.parametrize(
    "on_update", [pytest.param("continue", marks=pytest.mark.slow), pytest.param("abort", marks=pytest.mark.nightly)]
)
def test_new_weights_take_over_the_responses_that_are_being_generated(app, on_update):
    done = app(*ASYNC, *LONG, f"async_rl.on_update={on_update}", "trainer.total_training_steps=6")
    assert done.code == 0, done.err
    assert "+ 0 dropped + 0 held" in done.out
    steps, spans = [m for m in done.metrics if m["step"]], "training/off_policy/trajectory_spans/max"
    counted, other = ("continued", "restarted") if on_update == "continue" else ("restarted", "continued")
    assert sum(m[f"async/{counted}"] for m in steps) > 0
    assert {m[f"async/{other}"] for m in steps} == {0}
    longest = max(m[spans] for m in steps)
    assert 1 < longest <= 3 if on_update == "continue" else longest == 1
    assert max(m["training/off_policy/trajectory_staleness_worst/max"] for m in steps) <= 2


@pytest.mark.slow
def test_old_log_probs_are_interpolated_without_a_pass_of_the_actor(app):
    """From the third step on there are responses of weights two versions older."""
    done = app(*ASYNC, "algorithm.old_log_prob=interpolate", "rollout.num_workers=1", "actor.use_kl_loss=false")
    assert done.code == 0, done.err
    steps = [m for m in done.metrics if m["step"]]
    ages = [m["training/off_policy/trajectory_staleness_worst/max"] for m in steps]
    assert max(ages) == 2
    assert all("timing_s/old_log_prob" not in m and m["old_log_prob/recomputed"] == 0 for m in steps)
    moved = {age: [] for age in (0, 1, 2)}
    for age, step in zip(ages, steps, strict=True):
        moved[age].append(step["rollout_corr/rollout_is_mean"])
    assert set(moved[0] + moved[1]) <= {1.0}
    assert all(mean != 1 for mean in moved[2])
    assert any(m["actor/grad_norm"] > 0 for m in steps)


@pytest.mark.slow
def test_ready_groups_are_trained_first_and_those_that_get_too_old_are_dropped(app):
    done = app(
        *ASYNC,
        *LONG,
        "async_rl.order=ready_first",
        "async_rl.when_stale=drop",
        "async_rl.on_update=continue",
        "async_rl.max_inflight_prompts=24",
        "rollout.temperature=1.5",  # lengths differ, so short responses overtake long ones
        "trainer.total_training_steps=8",
        "trainer.save_freq=3",
    )
    assert done.code == 0, done.err
    found = re.search(r"(\d+) prompts finished = (\d+) trained \+ (\d+) dropped \+ 0 held", done.out)
    assert found is not None, done.out
    finished, trained, dropped = map(int, found.groups())
    assert (trained, finished) == (64, 64 + dropped)
    steps = [m for m in done.metrics if m["step"]]
    totals = {name: sum(m[f"async/{name}"] for m in steps) for name in ("admitted", "refilled", "dropped")}
    assert totals == {"admitted": finished, "refilled": dropped, "dropped": dropped}
    name = "training/off_policy/trajectory_staleness_worst"
    assert 0 < max(m[f"{name}/max"] for m in steps) <= 2


COMBINED = {
    "sessions of several turns": ("algorithm=grpo_calculator",),
    "a critic and adapters": ("algorithm=ppo", "lora.rank=4"),
    "a filter of groups": (
        "algorithm.filter_groups.enable=true",
        "algorithm.filter_groups.max_num_gen_batches=1000",
    ),
}
AGES = tuple(f"training/off_policy/trajectory_{name}" for name in ("spans", "staleness", "staleness_worst"))


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=pytest.mark.slow if "filter" in kind else pytest.mark.nightly) for kind in COMBINED],
)
def test_all_kinds_of_training_run_ahead_and_lose_no_group(app, request, kind):
    model = [f"model.path={request.getfixturevalue('calculator_model')}"] if "turns" in kind else []
    done = app(
        *ASYNC,
        *COMBINED[kind],
        *model,
        "async_rl.order=ready_first",
        "async_rl.when_stale=drop",
        "async_rl.on_update=continue",
    )
    assert done.code == 0, done.err
    found = re.search(r"(\d+) prompts finished = (\d+) trained \+ (\d+) dropped \+ 0 held", done.out)
    assert found is not None, done.out
    finished, trained, dropped = map(int, found.groups())
    assert (finished, trained) == (trained + dropped, 32)
    steps = [m for m in done.metrics if m["step"]]
    assert sum(m["async/refilled"] for m in steps) == dropped
    for step in steps:
        assert {f"{name}/{part}" for name in AGES for part in ("min", "mean", "max")} <= step.keys()
        assert {
            f"async/{name}" for name in ("admitted", "dropped", "refilled", "continued", "restarted")
        } <= step.keys()
    idle = {name for step in steps for name in step if name.startswith("idle/")}
    roles, causes = ("rollout", "trainer", "reward"), ("starved", "refit", "validation")
    assert idle == {f"idle/{role}/{cause}" for role in roles for cause in causes}
    assert 0 < max(m["training/off_policy/trajectory_staleness_worst/max"] for m in steps) <= 2


def parameters(folder):
    return hashlib.sha256((folder / "checkpoint" / "model.safetensors").read_bytes()).hexdigest()


@pytest.mark.timeout(900)
@pytest.mark.nightly
@pytest.mark.parametrize("bound", [1, 2])
def test_a_run_whose_driver_is_killed_ends_with_the_parameters_of_one_that_was_not(
    app, tmp_path, mark, base_model, bound
):
    """The resumed run trains first on the batches that the checkpoint has."""
    common = (
        *ASYNC,
        f"async_rl.max_staleness={bound}",
        "trainer.total_training_steps=8",
        "trainer.deterministic=true",
        "trainer.save_freq=1",
        "trainer.max_ckpt_to_keep=0",
    )
    small = (
        f"model.path={base_model}",
        "data.val_size=32",
        "data.train_batch_size=8",
        "actor.ppo_mini_batch_size=8",
        "rollout.num_workers=1",
        "actor.use_kl_loss=false",
    )
    folder = tmp_path / "killed"
    process = started(mark, folder, *small, *common, lines=2)
    deadline = time.monotonic() + 400
    while not (folder / "checkpoints" / step_name(2)).exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    (driver,) = [p for p in marked(mark) if "trainer.run_name=killed" in words_of(p) and name_of(p) != "uv"]
    driver.send_signal(signal.SIGKILL)
    process.communicate(timeout=300)
    assert not (folder / "checkpoint").exists()
    found, _ = newest_whole(folder / "checkpoints")
    step = found.manifest.step
    assert [batch.turn for batch in found.held.batches] == list(range(step + 1, min(step + bound, 8) + 1))

    resumed = app(*common, "trainer.run_name=killed", "trainer.resume_mode=auto")
    assert resumed.code == 0, resumed.err
    assert f"resumes after step {step} " in resumed.out
    assert "+ 0 dropped + 0 held" in resumed.out
    straight = app(*common, "trainer.run_name=straight")
    assert straight.code == 0, straight.err
    assert parameters(folder) == parameters(tmp_path / "straight")

    damaged = tmp_path / "damaged" / step_name(2)
    shutil.copytree(tmp_path / "straight" / "checkpoints" / step_name(2), damaged)
    rows = damaged / "held" / "train.batch"
    rows.write_bytes(rows.read_bytes()[:-1])
    refused = app(*common, f"trainer.resume_mode={damaged}", "trainer.run_name=other")
    assert refused.code == 2
    assert "is no whole checkpoint: held/train.batch has " in refused.err
    assert not (tmp_path / "other").exists()


@contextlib.contextmanager
def delayed(folder, workers, seed):
    """Stop one worker process of a run after the other, each for up to 500 ms."""
    over, stops = threading.Event(), []

    def work():
        draw = random.Random(seed)
        while not over.wait(draw.uniform(0, 0.1)):
            worker = draw.choice(workers)
            with contextlib.suppress(OSError, IndexError, psutil.Error):  # it has not started, or has ended
                process = psutil.Process(processes_of(folder, worker)[-1])
                process.suspend()
                try:
                    stops.append(draw.uniform(0, 0.5))
                    over.wait(stops[-1])
                finally:
                    process.resume()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield stops
    finally:
        over.set()
        thread.join()


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_parameters_depend_neither_on_delays_nor_on_the_number_of_workers(app, tmp_path):
    """The table of all runs is committed as `deterministic_runs.json`."""
    runs, steps = [], 20

    def run(count, seed):
        folder = tmp_path / f"{count}-{seed}"
        names = ["actor", "reward", *(f"rollout-{i}" for i in range(count))]
        with contextlib.ExitStack() as stack:
            stops = stack.enter_context(delayed(folder, names, seed)) if seed is not None else []
            done = app(
                *ASYNC,
                f"trainer.total_training_steps={steps}",
                "trainer.deterministic=true",
                f"rollout.num_workers={count}",
                f"trainer.run_name={folder.name}",
            )
        assert done.code == 0, done.err
        assert "+ 0 dropped + 0 held" in done.out
        digest = parameters(folder)
        runs.append({"workers": count, "seed": seed, "stops": len(stops), "stopped_s": round(sum(stops), 1)})
        runs[-1]["sha256"] = digest
        return digest

    expected = run(1, None)
    found = {run(count, seed) for count in (1, 2, 3) for seed in range(5)}
    (tmp_path / "runs.json").write_text(json.dumps({"steps": steps, "max_staleness": 2, "runs": runs}, indent=1) + "\n")
    assert found == {expected}
    assert min(one["stops"] for one in runs[1:]) >= steps
