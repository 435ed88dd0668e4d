"""Where a run resumes, and which settings may have changed, before a worker starts."""

from __future__ import annotations

import json

import pytest
from empty_checkpoints import save_checkpoints

from rl_app_ppo.config.loading import load_config, to_yaml
from rl_app_ppo.inputs.epochs import with_length
from rl_app_ppo.inputs.input_files import InputFiles
from rl_app_ppo.outputs.metrics_file import kept_metrics
from rl_app_ppo.outputs.resume import Start
from rl_app_ppo.outputs.resume import find_start as find_start_with
from rl_app_ppo.outputs.run_folder import set_aside
from rl_protocol import ConfigError, OutputError
from rl_trainer.checkpoints.checkpoint_folder import step_name

RESUME = ("trainer.run_name=r", "trainer.resume_mode=auto")


def find_start(config, folder, inputs=InputFiles()):  # noqa: B008 - it is frozen
    return find_start_with(config, folder, inputs)


@pytest.fixture
def folder(tmp_path):
    """A run folder with checkpoints of steps 2 and 4, from a run of 10 steps with the defaults."""

    config = to_yaml(load_config([*RESUME, "trainer.total_training_steps=10", "actor.optim.lr=1e-3"]))
    save_checkpoints(tmp_path / "checkpoints", (2, 4), config)
    return tmp_path


def config(*overrides):
    return load_config([*RESUME, "trainer.total_training_steps=10", "actor.optim.lr=1e-3", *overrides])


def test_auto_takes_the_newest_whole_one_and_says_which_it_passed_over(folder):
    start = find_start(config(), folder)
    assert start.checkpoint.manifest.step == 4
    assert start.notes == [f"resumes after step 4 ({folder / 'checkpoints' / step_name(4)})"]
    state = folder / "checkpoints" / step_name(4) / "trainer.json"
    size = state.stat().st_size
    state.write_text("{")
    start = find_start(config(), folder)
    assert start.checkpoint.manifest.step == 2
    assert (
        start.notes[0] == f"checkpoint step-000004 is skipped: trainer.json has 1 bytes, and the manifest says {size}"
    )


def test_without_a_checkpoint_auto_begins_and_disable_never_looks(folder, tmp_path):
    assert find_start(config(), tmp_path / "other") == Start(notes=[], set_aside=True)
    assert find_start(load_config(["trainer.run_name=r"]), folder) == Start()


def test_auto_never_starts_over_in_a_folder_with_results(folder, tmp_path):
    """A new start would overwrite the run's configuration, metrics and model."""
    finished = tmp_path / "finished"
    (finished / "checkpoint").mkdir(parents=True)
    with pytest.raises(
        OutputError, match=r"finds no whole checkpoint in .*finished: it has a finished model in checkpoint/"
    ):
        find_start(config(), finished)
    for step in (2, 4):
        (folder / "checkpoints" / step_name(step) / "trainer.json").write_text("{")
    with pytest.raises(OutputError, match=r"step-000004 is skipped: .*; checkpoint step-000002 is skipped: .*"):
        find_start(config(), folder)


def test_a_finished_run_is_left_as_it_is_until_it_is_made_longer(folder):
    ended = config("trainer.total_training_steps=4")
    assert not find_start(ended, folder).finished  # its model has not been written
    (folder / "checkpoint").mkdir()
    start = find_start(ended, folder)
    assert start.finished
    assert start.notes == [
        f"{folder} has done its 4 steps already; there is nothing to do. Raise trainer.total_training_steps to train further."
    ]
    assert not find_start(config(), folder).finished


def test_what_an_attempt_without_a_checkpoint_has_left_is_kept(tmp_path):
    for attempt in ("1", "2"):
        (tmp_path / "metrics.jsonl").write_text(attempt)
        (tmp_path / "logs").mkdir()
        (note,) = set_aside(tmp_path)
        assert f"attempts/{attempt}" in note
        assert [path.name for path in tmp_path.iterdir()] == ["attempts"]
        assert (tmp_path / "attempts" / attempt / "metrics.jsonl").read_text() == attempt
        assert (tmp_path / "attempts" / attempt / "logs").is_dir()
    assert set_aside(tmp_path) == []


def test_a_path_names_one_checkpoint(folder):
    path = folder / "checkpoints" / step_name(2)
    assert find_start(config(f"trainer.resume_mode={path}"), folder / "new").checkpoint.manifest.step == 2
    with pytest.raises(ConfigError, match=r"trainer\.resume_mode='.*' is no whole checkpoint: manifest\.json can't be"):
        find_start(config(f"trainer.resume_mode={folder}"), folder)


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("lora.rank=4", r"lora\.rank=4"),
        ("model.path=/other", r"model\.path='/other'"),
        ("algorithm.adv_estimator=rloo", r"algorithm\.adv_estimator='rloo'"),
        ("trainer.seed=1", r"trainer\.seed=1"),
        ("rollout.n=4", r"rollout\.n=4"),
        ("actor.clip_ratio_high=0.5", r"actor\.clip_ratio_high=0\.5"),
        ("data.train_size=999", r"data\.train_size=999"),
    ],
)
def test_what_is_learnt_may_not_change(folder, override, key):
    with pytest.raises(
        ConfigError, match=rf"{key} is not what the checkpoint .* was trained with, .*resume_mode=disable"
    ):
        find_start(config(override), folder)


def test_length_outputs_and_how_it_is_computed_may_change_and_are_told(folder):
    more = ["trainer.total_training_steps=20", "actor.optim.lr=1e-4", "model_engine=fsdp", "fsdp.world_size=2"]
    start = find_start(config("trainer.save_freq=3", *more), folder)
    assert start.checkpoint.manifest.step == 4
    assert "changed since then: trainer.total_training_steps: 10 -> 20" in start.notes
    assert "changed since then: actor.optim.lr: 0.001 -> 0.0001" in start.notes
    assert "changed since then: trainer.save_freq: 10 -> 3" in start.notes
    with pytest.raises(ConfigError, match=r"trainer\.total_training_steps must be at least 4, .*; got 3"):
        find_start(config("trainer.total_training_steps=3"), folder)


def test_an_engine_whose_state_is_of_another_kind_does_not_go_on(folder):
    with pytest.raises(ConfigError, match=r"model_engine='megatron' is not what .* was trained with, 'torch'"):
        find_start(config("model_engine=megatron", "lora.rank=8"), folder)


def test_a_resumed_run_may_have_more_epochs(folder):
    now = config("trainer.total_epochs=3", "trainer.total_training_steps=-1")
    start = find_start(with_length(now), folder)
    assert "changed since then: trainer.total_epochs: 0 -> 3" in start.notes
    assert f"changed since then: trainer.total_training_steps: 10 -> {3 * (4000 // 64)}" in start.notes


def test_the_order_of_a_list_is_part_of_what_is_learnt_and_its_form_is_not(folder):
    for path in folder.rglob("*"):
        if path.is_file() and "target_modules:\n  - all-linear" in path.read_text(errors="replace"):
            break
    else:
        raise AssertionError("no checkpoint has the configuration")
    start = find_start(config("trainer.logger=console"), folder)
    assert "changed since then: trainer.logger: ['console', 'tensorboard'] -> ['console']" in start.notes


# -- files of the run
BEFORE = InputFiles(
    data={"data.train_files": {"a.jsonl": "1", "b.jsonl": "2"}, "data.val_files": {"v.jsonl": "3"}},
    code={"reward.function": {"/x/r.py": "4"}},
)
FILES = ("data.train_files=[a.jsonl,b.jsonl]", "data.val_files=v.jsonl")


@pytest.fixture
def with_files(tmp_path):
    """A run folder with a checkpoint of a run that has read BEFORE."""
    save_checkpoints(tmp_path / "checkpoints", [2], to_yaml(config(*FILES)), inputs=BEFORE.digests)
    return tmp_path


def changed(key, name):
    """BEFORE with another digest of a file."""
    return InputFiles(
        **{
            kind: {k: {n: "9" if (k, n) == (key, name) else d for n, d in files.items()} for k, files in groups.items()}
            for kind, groups in (("data", BEFORE.data), ("code", BEFORE.code))
        }
    )


@pytest.mark.parametrize(("key", "name"), [("data.train_files", "b.jsonl"), ("data.val_files", "v.jsonl")])
def test_a_changed_data_file_is_refused_until_it_is_accepted(with_files, key, name):
    assert find_start(config(*FILES), with_files, BEFORE).notes[1:] == []
    now = changed(key, name)
    with pytest.raises(ConfigError, match=rf"^{key}: {name} is not the file that .* set data\.on_changed_file=accept"):
        find_start(config(*FILES), with_files, now)
    notes = find_start(config(*FILES, "data.on_changed_file=accept"), with_files, now).notes
    assert notes[1:] == [f"warning: {name} ({key}) has changed since then; it is accepted (data.on_changed_file)"]


def test_a_finished_run_with_changed_data_is_refused_too(with_files):
    (with_files / "checkpoint").mkdir()
    done = config(*FILES, "trainer.total_training_steps=2")
    assert find_start(done, with_files, BEFORE).finished
    with pytest.raises(ConfigError, match=r"^data\.train_files: a\.jsonl is not the file"):
        find_start(done, with_files, changed("data.train_files", "a.jsonl"))


def test_scores_of_rows_that_have_changed_are_not_used(tmp_path):
    save_checkpoints(
        tmp_path / "checkpoints", [2], to_yaml(config(*FILES)), inputs=BEFORE.digests, prompt_order=b"scores"
    )
    accepting = config(*FILES, "data.on_changed_file=accept")
    assert find_start(accepting, tmp_path, BEFORE).checkpoint is not None
    with pytest.raises(ConfigError, match=r"a\.jsonl has changed .* which has the scores of its rows"):
        find_start(accepting, tmp_path, changed("data.train_files", "a.jsonl"))


def test_changed_code_is_a_warning(with_files):
    notes = find_start(config(*FILES), with_files, changed("reward.function", "/x/r.py")).notes
    assert notes[1:] == ["warning: the code /x/r.py (reward.function) has changed since then"]


def test_checkpoints_without_digests_are_resumed(folder):
    """As those of older versions."""
    assert find_start(config(), folder, BEFORE).notes == find_start(config(), folder).notes


def test_auto_needs_a_name():
    with pytest.raises(ConfigError, match=r"trainer\.run_name must be given with trainer\.resume_mode=auto"):
        load_config(["trainer.resume_mode=auto"])


def test_metrics_go_back_to_the_checkpoint_and_lose_half_lines(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": n, "a": n / 2}) + "\n" for n in range(5)) + '{"step": 5, "a"')
    assert [line["step"] for line in kept_metrics(path, 3)] == [0, 1, 2, 3]
    assert [json.loads(line)["a"] for line in path.read_text().splitlines()] == [0, 0.5, 1, 1.5]
    assert kept_metrics(tmp_path / "none.jsonl", -1) == []
