"""`python -m rl_app_ppo.merge_adapter ADAPTER OUT`: merge a PEFT adapter into its base model."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rl_app_ppo.config.model_path import find_model, read_json
from rl_protocol import ConfigError, OutputError, RLError

USAGE = "usage: python -m rl_app_ppo.merge_adapter ADAPTER OUT [BASE]   (BASE: a folder or name in place of the base that the adapter names)"


def merge_adapter(adapter: Path, out: Path, base: str = "") -> None:
    """Write the merged model, in float32, and its tokenizer to the new folder `out`.

    Raises:
        ConfigError: adapter or base can't be read, or they do not match.
        OutputError: `out` exists or can't be written.
    """
    named = base or str(read_json(adapter / "adapter_config.json", str(adapter)).get("base_model_name_or_path") or "")
    if out.exists():
        raise OutputError(f"{out} exists already; nothing is overwritten. Name another folder.")
    if not named:
        raise ConfigError(
            f"{adapter / 'adapter_config.json'} names no base model; give it as the third argument. {USAGE}"
        )
    try:
        folder = find_model(named)
    except ConfigError as error:
        raise ConfigError(
            f"The base model of {adapter} can't be used: {error} Or give it as the third argument."
        ) from error
    from rl_trainer.backends.merge_adapter import write_merged  # torch, transformers and peft

    write_merged(folder, adapter, out)


def main(argv: Sequence[str]) -> int:
    """Run the command line; returns the exit code."""
    if len(argv) not in (2, 3):
        sys.stderr.write(USAGE + "\n")
        return 2
    try:
        merge_adapter(Path(argv[0]), Path(argv[1]), *argv[2:])
    except RLError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    sys.stdout.write(f"merged model: {argv[1]}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
