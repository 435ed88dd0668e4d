"""Errors of the packages, which name their own parameters, reach users with the keys of the app."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

import pytest

from rl_app_ppo.checks.facts import Facts
from rl_app_ppo.checks.registry import preflight
from rl_app_ppo.config.full_keys import (
    FullKeysFormatter,
    RunLog,
    full_keys_in_errors,
    full_keys_in_logs,
    with_full_keys,
)
from rl_app_ppo.config.loading import load_config
from rl_ckpt_engine import PluginPolicy
from rl_protocol import CapacityTimeout, ConfigError


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("raise TransferQueueConfig.capacity_mb.", "raise transfer_queue.capacity_mb."),
        ("CheckpointEngineConfig.listen='x' is no", "checkpoint_engine.listen='x' is no"),
        ("set ReplayConfig.on_failure or ReplayConfig.max_attempts", "set replay.on_failure or replay.max_attempts"),
        ("with SamplingParams.max_new_tokens=6", "with rollout.response_length=6"),
        ("lower CheckpointWriter.keep", "lower trainer.max_ckpt_to_keep"),
        ("load_reward.name='x' is not known", "reward.function='x' is not known"),
        ("RolloutConfig.n is of a base class", "rollout.n is of a base class"),
        ("UpdateConfig.ppo_epochs is of two groups", "UpdateConfig.ppo_epochs is of two groups"),
        ("TransferQueueConfig.unknown, Path.exists and e.g.x", "TransferQueueConfig.unknown, Path.exists and e.g.x"),
    ],
)
def test_a_parameter_gets_its_key(message, shown):
    assert with_full_keys(message) == shown


def test_an_error_keeps_its_type_and_facts():
    with (
        pytest.raises(CapacityTimeout, match=r"^full; raise transfer_queue\.capacity_mb$") as caught,
        full_keys_in_errors(),
    ):
        raise CapacityTimeout("full; raise TransferQueueConfig.capacity_mb", waited_s=3)
    assert caught.value.waited_s == 3


def test_a_wrong_address_of_the_data_plane_is_refused_with_its_key():
    config = load_config(["transfer_queue.listen=nowhere:99999"])
    with pytest.raises(ConfigError, match=r"transfer_queue\.listen='nowhere:99999'"):
        preflight(Facts(config, PluginPolicy()))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rollout.n=1"], r"rollout\.n must be at least 2 with algorithm\.adv_estimator=grpo"),
        (["algorithm.adv_estimator=nope"], r"^algorithm\.adv_estimator must be one of"),
        (["actor.policy_loss.loss_mode=nope"], r"^actor\.policy_loss\.loss_mode must be one of"),
        (["reward.function=nope"], r"^reward\.function='nope' is not known"),
        (["reward.function=nope.toml"], r"^reward\.function='nope\.toml': .* does not exist"),
        (["rollout.session=nope"], r"^rollout\.session must be one of"),
        (
            ["trainer.hooks=nope"],
            r"^trainer\.hooks must be empty, because no installed package registers a Hook; got 'nope'",
        ),
        (["data.curriculum=nope"], r"^data\.curriculum must be one of"),
        (["data.train_files=nope.csv"], r"data\.train_files and data\.val_files can be \*\.jsonl"),
        (["model_engine=nope"], r"^model_engine must be one of"),
        (
            ["async_rl.max_staleness=1", "actor.policy_loss.loss_mode=gpg"],
            r"^async_rl\.max_staleness=1 .* set algorithm\.rollout_correction\.rollout_is=token",
        ),
    ],
)
def test_a_refused_option_is_named_with_its_key(overrides, message):
    with pytest.raises(ConfigError, match=message) as refused:
        preflight(Facts(load_config(overrides), PluginPolicy()))
    assert not re.search(r"\b[A-Z]\w+\.[a-z]", str(refused.value))


def test_a_log_has_the_keys():
    record = logging.LogRecord("rl", logging.WARNING, "", 0, "%s=bfloat16 is slow", ("TorchConfig.param_dtype",), None)
    assert FullKeysFormatter().format(record).endswith("WARNING rl: torch.param_dtype=bfloat16 is slow")


def test_the_records_of_a_block_have_the_keys(caplog):
    logger = logging.getLogger("rl")
    with full_keys_in_logs():
        logger.warning("%s=bfloat16 is slow", "TorchConfig.param_dtype")
    logger.warning("%s=bfloat16 is slow", "TorchConfig.param_dtype")
    assert caplog.messages == ["torch.param_dtype=bfloat16 is slow", "TorchConfig.param_dtype=bfloat16 is slow"]


def test_rows_that_are_skipped_before_a_run_are_named_with_its_keys(tmp_path, caplog):
    rows = [{"prompt": f"{i}+1=", "data_source": "sums", "reward_model": {"ground_truth": "1"}} for i in range(64)]
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"prompt": "1+1="}]))
    words = [
        f"data.train_files={file}",
        "data.on_bad_row=skip",
        f"model.cache_dir={tmp_path}",
        "data.train_batch_size=8",
    ]
    preflight(Facts(load_config([*words, "actor.ppo_mini_batch_size=8", "rollout.response_length=4"]), PluginPolicy()))
    (message,) = caplog.messages
    assert message.startswith(
        f"left out: 1 bad row: {file}, row 65: missing fields: reward_model or ground_truth (data.ground_truth_key);"
    )


def test_a_log_on_a_full_disk_prints_no_traceback_and_can_be_closed(capsys: pytest.CaptureFixture[str]) -> None:
    log = RunLog(Path("/dev/full"))
    logger = logging.Logger("rl")
    logger.addHandler(log)
    logger.warning("lost")
    assert not capsys.readouterr().err
    logger.warning("%d", "no number")
    assert "not str" in capsys.readouterr().err
    log.close()
