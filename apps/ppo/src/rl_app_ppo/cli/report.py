"""`rl report`: the report of a run, or of two runs to compare."""

from __future__ import annotations

import os
import webbrowser
from pathlib import Path

from rich.console import Console
from rich.text import Text

from rl_app_ppo.outputs.run_folder import RunFiles
from rl_app_ppo.report.page import is_report, write_report
from rl_protocol import ConfigError, OutputError


def report(run: Path, other: Path | None, target: Path | None, out: Console, *, show: bool = False) -> None:
    """Write the report and print its path and size.

    Args:
        run: folder of the run.
        other: folder of the run to compare it with.
        target: the file; None: report.html in the folder of the run, or compared-with-OTHER.html.
        out: where to print.
        show: open it in the browser of the desktop, or of the environment variable BROWSER.

    Raises:
        ConfigError: a folder holds no run, or it can't be read; or `target` is in no folder; or
            there is no browser to open it.
        OutputError: the file can't be written, or `target` exists and is no report.
    """
    folders = [run, *([other] if other is not None else [])]
    beside = RunFiles(folder=run).report if other is None else run / f"compared-with-{other.resolve().name}.html"
    path = Path(os.path.realpath(target)) if target is not None else beside  # a link such as /dev/stdout stays one
    if target is not None and (not path.parent.is_dir() or (path.exists() and not path.is_file())):
        raise ConfigError(f"--out {target} must be a file in a folder that exists, such as report.html.")
    if target is not None and path.exists() and not is_report(path):
        raise OutputError(f"--out {target} exists and is no report; choose another name, or remove it.")
    size = write_report(
        folders, path, remedy="Free some space, or give a file of a folder that you may write to as --out."
    )
    out.print(Text(f"{path.resolve()} ({size / 1e6:.2f} MB)"), soft_wrap=True)
    if show and not webbrowser.open(path.resolve().as_uri()):
        raise ConfigError(
            "--open found no browser on this machine; set the environment variable BROWSER to the command of one."
        )
