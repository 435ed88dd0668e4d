"""Permission for files of code, as a user gives it with `--trust`."""

from __future__ import annotations

import os
from pathlib import Path

from rl_protocol.support.trusted_files import given_files, variables_for


def trust(*files: Path) -> None:
    """Allow the files as they are now, until the end of the test."""
    os.environ.update(variables_for(given_files(files, "trust")))
