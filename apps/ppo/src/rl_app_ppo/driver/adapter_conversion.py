"""Converts an adapter in verl's old format at the start of a run, in a process that has torch."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import DEVNULL, PIPE
from pathlib import Path

from rl_app_ppo.config.model_path import given_adapter, given_model, is_verl_adapter
from rl_app_ppo.config.schema import AppConfig
from rl_app_ppo.outputs.console import Screen
from rl_app_ppo.outputs.run_folder import RunFiles
from rl_app_ppo.outputs.startup_times import Startup
from rl_protocol import ConfigError, WorkerError

_REFUSED = 2
"""Exit code of `rl_megatron_peft` for input that it refuses."""
_KILLED_S = 10.0
"""Seconds that a killed process has to end."""


def initial_adapter(config: AppConfig, files: RunFiles) -> str:
    """Absolute path of the PEFT folder that the policy starts from; empty: none."""
    return str(files.adapter) if is_verl_adapter(config.lora.adapter_path) else given_adapter(config)


async def convert_adapter(config: AppConfig, files: RunFiles, screen: Screen, startup: Startup) -> None:
    """Write the PEFT folder of an adapter in verl's old format, unless an earlier attempt has.

    Does nothing with any other `lora.adapter_path`. The process ends with this call.

    Raises:
        ConfigError: the adapter can't be read, or has another base model; names file and field.
        WorkerError: the conversion takes longer than `ray.start_timeout_s`, or dies.
    """
    base = given_model(config)
    if base is None or not is_verl_adapter(config.lora.adapter_path) or files.adapter.exists():
        return
    with startup.phase("adapter", "converting the adapter"):
        await _convert(config, base, files.adapter)
    screen.note(f"adapter: converted from verl's old format into {files.adapter}")


async def _convert(config: AppConfig, base: Path, target: Path) -> None:
    given, timeout_s = config.lora.adapter_path, config.ray.start_timeout_s
    command = [sys.executable, "-m", "rl_megatron_peft", "convert", given_adapter(config), str(target)]
    command += ["--to", "peft", "--base", str(base), "--alpha", repr(config.lora.alpha)]
    # a Ctrl-C is for the driver, which ends this process
    process = await asyncio.create_subprocess_exec(
        *command, stdin=DEVNULL, stdout=DEVNULL, stderr=PIPE, start_new_session=True
    )
    try:
        async with asyncio.timeout(timeout_s):
            _, output = await process.communicate()
    except TimeoutError as error:
        raise WorkerError(
            f"Converting lora.adapter_path={given!r} took longer than ray.start_timeout_s={timeout_s:g}; set a longer one."
        ) from error
    finally:
        if process.returncode is None:
            process.kill()
            async with asyncio.timeout(_KILLED_S):
                await process.wait()
    text = output.decode(errors="replace").strip()
    if process.returncode == _REFUSED:
        raise ConfigError(f"lora.adapter_path={given!r} can't be converted: {text.partition('error: ')[2] or text}")
    if process.returncode:
        last = text.splitlines()[-1] if text else "it wrote no error"
        raise WorkerError(f"Converting lora.adapter_path={given!r} ended with code {process.returncode}: {last}")
