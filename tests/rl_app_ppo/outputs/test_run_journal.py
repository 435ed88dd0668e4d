"""The journal of a run: what it can't be combined with, whose rows it has, and what is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl_app_ppo.config.loading import load_config
from rl_app_ppo.inputs.input_files import InputFiles
from rl_app_ppo.outputs.run_folder import JOURNAL, RunFiles, set_aside
from rl_app_ppo.outputs.run_journal import (
    check_kept_rows,
    describe,
    keep_rows,
    plane_settings,
    require_journal,
    require_own_rows,
)
from rl_protocol import ConfigError
from rl_trainer.driver.kept_rows import RecoveredRows
from rl_transferqueue.journal.disk_journal import open_journal
from rl_transferqueue.launch.server_specs import Recovery


def config(*overrides):
    return load_config(["transfer_queue.durability=commit", "trainer.run_name=a", *overrides])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["trainer.save_freq=0"], r"^trainer\.save_freq must be at least 1 with transfer_queue\.durability=commit"),
        (
            ["async_rl.max_staleness=1", "async_rl.order=ready_first"],
            r"^async_rl\.order must be in_order with transfer_queue\.durability=commit: .*; got 'ready_first'",
        ),
        (
            ["async_rl.max_staleness=1", "algorithm.filter_groups.enable=true"],
            r"^trainer\.deterministic must be true with transfer_queue\.durability=commit, async_rl\.max_staleness above 0",
        ),
    ],
)
def test_what_a_restarted_run_could_not_repeat_is_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        check_kept_rows(config(*overrides))
    check_kept_rows(config(*overrides, "transfer_queue.durability=off"))


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["async_rl.max_staleness=1"],
        ["algorithm.filter_groups.enable=true"],
        [
            "async_rl.max_staleness=1",
            "algorithm.filter_groups.enable=true",
            "trainer.deterministic=true",
            "trainer.threads_per_worker=1",
        ],
    ],
)
def test_what_it_can_repeat_is_not(overrides):
    check_kept_rows(config(*overrides))


def test_the_journal_is_in_the_folder_of_the_run_unless_another_is_set(tmp_path):
    files = RunFiles(folder=tmp_path / "a")
    assert plane_settings(config(), files).journal_dir == str(tmp_path / "a" / "journal")
    assert plane_settings(config("transfer_queue.journal_dir=/x"), files).journal_dir == "/x"
    off = config("transfer_queue.durability=off")
    assert plane_settings(off, files) == off.transfer_queue
    assert keep_rows(off, files.folder, InputFiles()) is None


def test_only_settings_that_change_what_is_sampled_make_rows_useless(tmp_path):
    before = keep_rows(config(), tmp_path / "a", InputFiles())
    assert before is not None
    assert before.run == "a"
    for same in (
        "trainer.total_training_steps=99",
        "transfer_queue.capacity_mb=99",
        "trainer.save_freq=3",
        "rollout.val_kwargs.n=2",
    ):
        assert keep_rows(config(same), tmp_path / "a", InputFiles()) == before, same
    for other in (
        "rollout.temperature=0.5",
        "actor.optim.lr=1e-5",
        "data.train_batch_size=32",
        "algorithm.name=ppo",
        "rollout.n=4",
    ):
        assert keep_rows(config(other), tmp_path / "a", InputFiles()) != before, other


def test_rows_of_other_data_are_not_used(tmp_path):
    def rows(digest, code="1"):
        inputs = InputFiles(data={"data.train_files": {"a.jsonl": digest}}, code={"reward.function": {"/r.py": code}})
        return keep_rows(config(), tmp_path / "a", inputs)

    assert rows("1") == rows("1") == rows("1", code="2")  # rewards are computed again
    assert rows("1") != rows("2")


def test_rows_in_the_journal_of_a_new_run_are_refused():
    settings = config("transfer_queue.journal_dir=/x").transfer_queue
    found = Recovery(rows_kept=3, rows_incomplete=0, bytes_cut=0, segments_removed=0)
    with pytest.raises(ConfigError, match=r"TransferQueueConfig\.journal_dir=/x has 3 rows of another run"):
        require_own_rows(settings, found, resumes=False)
    require_own_rows(settings, found, resumes=True)
    require_own_rows(settings, None, resumes=False)


def test_a_journal_that_another_run_has_open_is_refused_after_a_while(tmp_path, monkeypatch):
    monkeypatch.setattr("rl_app_ppo.outputs.run_journal._LOCK_S", 0.2)
    settings = config(f"transfer_queue.journal_dir={tmp_path / 'j'}").transfer_queue
    require_journal(settings)  # there is none yet
    with open_journal(tmp_path / "j"), pytest.raises(ConfigError, match="in use by another process"):
        require_journal(settings)
    require_journal(settings)


def test_an_attempt_without_a_checkpoint_leaves_its_journal_to_the_next(tmp_path):
    for name in (JOURNAL, "logs"):
        (tmp_path / name).mkdir()
        Path(tmp_path, name, "file").touch()
    set_aside(tmp_path)
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("file")} == {
        "journal/file",
        "attempts/1/logs/file",
    }


def test_a_restarted_run_says_what_it_uses_and_what_it_generates_again():
    found = Recovery(rows_kept=40, rows_incomplete=2, bytes_cut=5, segments_removed=0)
    assert describe(found, RecoveredRows(kept=3, restarted=2)) == (
        "journal: 40 rows kept, 2 damaged ones dropped, 5 bytes cut; used again: 3 prompts with finished responses; "
        "started again: 2 unfinished prompts"
    )
    text = describe(found, RecoveredRows(discarded=3, why="they were generated with other settings"))
    assert text.endswith("; discarded: 3 prompts (they were generated with other settings)")
