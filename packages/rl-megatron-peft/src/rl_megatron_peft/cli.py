"""Command line: `rl-megatron-peft convert SOURCE TARGET --to peft|resume --base MODEL [options]`.

Exit codes: 0 for success, 2 if the input is refused; the message names file and field.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from rl_protocol.errors import RLError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="rl-megatron-peft", description="Convert Megatron-Core adapters to and from PEFT."
    )
    commands = parser.add_subparsers(required=True)
    convert = commands.add_parser("convert", help="convert an adapter folder to another format")
    convert.add_argument(
        "source", type=Path, help="checkpoint to resume from, PEFT folder, or verl's adapter_checkpoint"
    )
    convert.add_argument("target", type=Path, help="folder to create")
    convert.add_argument("--to", choices=("peft", "resume"), required=True, help="format of the new folder")
    convert.add_argument("--base", type=Path, required=True, help="Hugging Face folder of the base model")
    convert.add_argument(
        "--alpha", type=float, help="LoRA alpha; required for verl's old format, which does not store it"
    )
    convert.add_argument(
        "--fused", action="store_true", help="with --to resume: share one A among the modules that Megatron fuses"
    )
    arguments = parser.parse_args(argv)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Megatron-Core on missing Transformer Engine and Apex
            # imports torch and Megatron, which --help does not need
            from rl_megatron_peft.backend.convert import convert as run

            kind = run(**vars(arguments))
    except ModuleNotFoundError as error:
        sys.stderr.write(f"error: {error.name} is not installed; pip install 'rl-megatron-peft[core]'\n")
        return 2
    except RLError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    sys.stdout.write(f"{arguments.source} ({kind.value}) -> {arguments.target}\n")
    return 0
