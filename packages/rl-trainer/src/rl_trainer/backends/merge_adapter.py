"""Merges a PEFT adapter into its base model."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import peft
from safetensors import SafetensorError
from transformers import AutoTokenizer

from rl_protocol import ConfigError, OutputError
from rl_protocol.support.peft_config import unread_field
from rl_trainer.backends.loading import load_model


def _check_known(adapter: Path) -> None:
    """Check that the installed peft knows all settings of the adapter; peft itself only warns.

    Raises:
        ConfigError: names the unknown setting.
    """
    file = adapter / "adapter_config.json"
    try:
        settings: dict[str, Any] = json.loads(file.read_text())
        kind = peft.PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType(settings["peft_type"])]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file} can't be read as the settings of an adapter: {error!r}.") from error
    if issubclass(kind, peft.PromptLearningConfig):
        raise ConfigError(
            f"{file}: peft_type={settings['peft_type']!r} adds tokens, which no weights of a model can do."
        )
    lost = unread_field(settings, {one.name for one in dataclasses.fields(kind)})
    if lost is not None:
        field, why = lost
        raise ConfigError(f"{file}: {field} {why}. Install the peft that wrote it ({settings.get('peft_version')}).")


def write_merged(base: Path, adapter: Path, out: Path) -> None:
    """Write base and adapter as one float32 model, with the tokenizer of the adapter, else of the
    base.

    Args:
        base: Hugging Face checkpoint folder.
        adapter: PEFT folder of an adapter for it.
        out: folder of the new checkpoint; created if missing.

    Raises:
        ConfigError: one of them can't be read, or the adapter does not fit the base.
        OutputError: a file can't be written.
    """
    _check_known(adapter)
    model = load_model(base)
    try:
        adapted: Any = peft.PeftModel.from_pretrained(model, str(adapter), local_files_only=True)
        merged: Any = adapted.merge_and_unload(safe_merge=True)
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        raise ConfigError(f"The adapter in {adapter} can't be merged into {base}: {error}") from error
    source = adapter if (adapter / "tokenizer.json").exists() else base
    tokenizer = AutoTokenizer.from_pretrained(str(source), local_files_only=True)
    try:
        merged.save_pretrained(str(out))
        tokenizer.save_pretrained(str(out))
    except (OSError, SafetensorError) as error:
        raise OutputError(
            f"The merged model can't be written to {out}: {error}. Free some space or name another folder."
        ) from error
