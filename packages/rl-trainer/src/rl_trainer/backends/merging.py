"""One model from a base and a PEFT adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
from safetensors import SafetensorError
from transformers import AutoTokenizer

from rl_protocol import ConfigError, OutputError
from rl_trainer.backends.loading import load_model


def write_merged(base: Path, adapter: Path, out: Path) -> None:
    """Write what base and adapter make together, in float32, with the tokenizer of the adapter's folder or else of the base.

    Args:
        base: Hugging Face checkpoint folder.
        adapter: PEFT folder of an adapter for it.
        out: where the checkpoint goes; made if it is not there.

    Raises:
        ConfigError: one of them can't be read, or the adapter does not fit the base.
        OutputError: a file can't be written.
    """
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
