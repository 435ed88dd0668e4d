"""Convert a configuration of verl, and say what is lost."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.text import Text


def import_verl(file: Path, out: Console, err: Console, *, accept_losses: bool) -> int:
    """Print the converted configuration; returns the exit code.

    Raises:
        ConfigError: the file can't be read or converted.
    """
    from rl_app_ppo.verl_import.convert import from_verl  # reads verl's defaults

    conversion = from_verl(file)
    out.print(Text(conversion.text), end="", soft_wrap=True)
    if not conversion.lost or accept_losses:
        return 0
    err.print(
        Text(
            f"lost values that change the result of training: {len(conversion.lost)}; see the lines '# lost:' above. "
            "--accept-losses makes the exit code 0."
        ),
        soft_wrap=True,
    )
    return 1
