"""The journal of a run (transfer_queue.durability): its folder, whose rows it has, and its end."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

from rl_app_ppo.config.loading import flat_settings, to_yaml
from rl_app_ppo.config.schema import AppConfig
from rl_app_ppo.inputs.input_files import InputFiles
from rl_app_ppo.outputs.run_folder import RunFiles
from rl_protocol import ConfigError
from rl_protocol.counted import counted
from rl_protocol.support.option_tree import list_options
from rl_protocol.support.options import require
from rl_trainer.driver.kept_rows import RecoveredRows
from rl_trainer.driver.trainer_parts import KeepRows
from rl_transferqueue import TransferQueueConfig
from rl_transferqueue.journal.disk_journal import check_journal
from rl_transferqueue.launch.server_specs import Recovery

_LOCK_S = 30.0
"""Seconds in which the data plane of a killed run gives its journal up."""
_NOT_WEIGHTS = ("transfer_queue.", "ray.", "checkpoint_engine.", "trainer.", "rollout.val_kwargs.")
"""How the names of options begin that may change while rows stay valid."""


def check_kept_rows(config: AppConfig) -> None:
    """Check the settings that `transfer_queue.durability` can't be combined with.

    Raises:
        ConfigError: names the key.
    """
    durability = config.transfer_queue.durability
    if durability == "off":
        return
    require(
        config.trainer.save_freq > 0,
        "trainer.save_freq",
        f"at least 1 with transfer_queue.durability={durability}, which keeps the rows of all steps since the last checkpoint",
        config.trainer.save_freq,
    )
    require(
        config.async_rl.order == "in_order",
        "async_rl.order",
        f"in_order with transfer_queue.durability={durability}: a restarted run must train each step on the same rows",
        config.async_rl.order,
    )
    require(
        config.trainer.deterministic or not config.async_rl.max_staleness or not config.algorithm.filter_groups.enable,
        "trainer.deterministic",
        f"true with transfer_queue.durability={durability}, async_rl.max_staleness above 0 and algorithm.filter_groups.enable=true: steps that "
        "are sampled at the same time draw further prompts in the order of arrival, which a restarted run can't repeat",
        config.trainer.deterministic,
    )


def plane_settings(config: AppConfig, files: RunFiles) -> TransferQueueConfig:
    """Settings of the data plane, with the folder of the journal if the run has one."""
    settings = config.transfer_queue
    if settings.durability == "off":
        return settings
    return replace(settings, journal_dir=settings.journal_dir or str(files.journal))


def require_journal(settings: TransferQueueConfig) -> None:
    """Check that the journal can be opened; waits for the end of a killed run that has it.

    Raises:
        ConfigError: it can't; names the folder.
    """
    if settings.durability != "off":
        check_journal(Path(settings.journal_dir), wait_s=_LOCK_S)


def require_own_rows(settings: TransferQueueConfig, found: Recovery | None, *, resumes: bool) -> None:
    """Check that the journal of a run that starts from the beginning is empty.

    Raises:
        ConfigError: it has rows.
    """
    if found is not None and found.rows_kept and not resumes:
        raise ConfigError(
            f"TransferQueueConfig.journal_dir={settings.journal_dir} has {counted(found.rows_kept, 'row')} of another run. Set another "
            "folder, or trainer.resume_mode=auto and that run's trainer.run_name to resume it."
        )


def keep_rows(config: AppConfig, folder: Path, inputs: InputFiles) -> KeepRows | None:
    """Which rows the run may use after a restart: those generated with these settings and data
    files; None: it has no journal.
    """
    if config.transfer_queue.durability == "off":
        return None
    settings = json.dumps([weight_settings(config), inputs.data], sort_keys=True, default=str)
    return KeepRows(run=folder.name, settings=hashlib.sha256(settings.encode()).hexdigest())


def weight_settings(config: AppConfig) -> dict[str, object]:
    """The settings, by key, that sampling or training depends on."""
    rules = {option.key: option.resume for option in list_options(AppConfig)}
    return {
        key: value
        for key, value in flat_settings(to_yaml(config)).items()
        if rules[key] == "fixed" or (rules[key] == "free" and not key.startswith(_NOT_WEIGHTS))
    }


def describe(found: Recovery, rows: RecoveredRows) -> str:
    """What a restarted run has recovered, for the user."""
    lost = f", {found.rows_incomplete} damaged ones dropped" if found.rows_incomplete else ""
    text = (
        f"journal: {counted(found.rows_kept, 'row')} kept{lost}, {counted(found.bytes_cut, 'byte')} cut; "
        f"used again: {counted(rows.kept, 'prompt')} with finished responses; started again: {counted(rows.restarted, 'unfinished prompt')}"
    )
    if rows.discarded:
        text += f"; discarded: {counted(rows.discarded, 'prompt')} ({rows.why})"
    return text
