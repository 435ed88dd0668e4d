"""The command: `serve` shows the site on this machine, `build` writes it."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rl_docs.repository import CONFIG_FILE

FOLDER = Path("outputs/site")


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit codes: 0 success, 1 a page has an error, 2 wrong arguments."""
    options = _parser().parse_args(arguments)
    if not CONFIG_FILE.is_file():
        sys.stderr.write(f"{CONFIG_FILE} is missing: the site is built in a checkout of the repository.\n")
        return 2
    if options.command == "build":
        return run_mkdocs(
            "build", "--strict", "--config-file", str(CONFIG_FILE), "--site-dir", str(options.out.absolute())
        )
    return run_mkdocs("serve", "--config-file", str(CONFIG_FILE), "--dev-addr", f"127.0.0.1:{options.port}")


def run_mkdocs(*arguments: str) -> int:
    """Run a command of mkdocs, which logs to standard error."""
    os.environ["NO_MKDOCS_2_WARNING"] = "true"  # of material, about a fork of mkdocs
    from mkdocs.__main__ import cli

    try:
        cli.main(args=list(arguments), prog_name="mkdocs")
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="uv run apps/docs", description=__doc__)
    parser.set_defaults(command="serve", port=8000)
    commands = parser.add_subparsers(dest="command", title="commands")
    serving = commands.add_parser("serve", help="serve the site on 127.0.0.1; the default")
    serving.add_argument("--port", type=int, default=8000, help="port; 8000 by default")
    building = commands.add_parser("build", help="write the site; a broken link is an error")
    building.add_argument("--out", type=Path, default=FOLDER, help=f"its folder; {FOLDER} by default")
    return parser
