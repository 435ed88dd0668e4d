"""Writes the report of one or two runs as one HTML file without network access."""

from __future__ import annotations

import base64
import hashlib
import html
import os
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from rl_app_ppo.outputs.run_folder import OUTPUT_REMEDY, writing
from rl_app_ppo.report.packing import Packer
from rl_app_ppo.report.run_data import RunData, packed_run
from rl_trainer.record.redaction import Redaction

_GENERATOR = b'<meta name="generator" content="rl report">'
_HEAD_BYTES = 1024
"""Bytes from the start of a report that contain _GENERATOR."""
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="generator" content="rl report">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<div id="app"><noscript>The report needs JavaScript; it loads nothing from a network.</noscript></div>
<script id="data" type="application/octet-stream">{data}</script>
<script>{script}</script>
</body>
</html>
"""


def write_report(folders: Sequence[Path], target: Path, *, remedy: str = OUTPUT_REMEDY) -> int:
    """Write the report of a run, or of two runs to compare; returns its size in bytes.

    Args:
        folders: of the runs.
        target: the file.
        remedy: what to do if it can't be written, for the message.

    Raises:
        ConfigError: see RunData.read.
        OutputError: the file can't be written.
    """
    page = report_page([RunData.read(folder) for folder in folders])
    with writing(target, remedy=remedy):
        unfinished = target.with_name(f".{target.name}.{os.getpid()}")  # a run and `rl report` may write at once
        try:
            unfinished.write_bytes(page)
            os.replace(unfinished, target)  # noqa: PTH105 - see publish_folder
        finally:
            unfinished.unlink(missing_ok=True)
    return len(page)


def is_report(path: Path) -> bool:
    """Whether a file is the report of a run, not another page or file."""
    with path.open("rb") as file:
        return _GENERATOR in file.read(_HEAD_BYTES)


def report_page(runs: Sequence[RunData]) -> bytes:
    """The page, UTF-8.

    What runs have recorded is data in it: no text of a run is part of the markup except its name
    in the title, which is escaped.
    """
    packer, redaction = Packer(), Redaction()
    header = {"runs": [packed_run(run, packer) for run in runs]}
    script, style = bundled("report.js"), bundled("report.css")
    page = _PAGE.format(
        policy=_policy(script, style),
        title=html.escape(" and ".join(run.name for run in runs)),
        style=style,
        data=base64.b64encode(packer.pack(header, redaction.clean)).decode(),
        script=script,
    )
    return page.encode()


def bundled(name: str) -> str:
    """A file that report_ui/ is built to."""
    return resources.files("rl_app_ppo.report").joinpath("bundle", name).read_text(encoding="utf-8")


def _policy(script: str, style: str) -> str:
    """Allows this script and this style and nothing else; no sink of the DOM takes a string."""
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (script, style)]
    return (
        f"default-src 'none'; script-src 'sha256-{hashes[0]}'; style-src 'sha256-{hashes[1]}'; base-uri 'none'; "
        "form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )
