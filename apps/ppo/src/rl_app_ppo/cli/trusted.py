"""Which files of code the user of the command line allows: `--trust`, and a question on a terminal.

Only files that the words of the command name are asked about, never those of a configuration file.
An answer holds for the path and the content, and is kept outside of run folders.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import platformdirs
from rich.console import Console

from rl_app_ppo.cluster.environment import environment
from rl_app_ppo.inputs.code_files import code_files
from rl_protocol.support.disk_writes import write_errors
from rl_protocol.support.trusted_files import digest, given_files, variables_for

Ask = Callable[[str], bool]


@contextmanager
def trusting(words: Sequence[str] | None, named: Sequence[Path] | None, err: Console) -> Generator[None]:
    """Allow the files of `--trust`, and those that the user allows now or has allowed before.

    Args:
        words: settings of the command line, `key=value`.
        named: files of `--trust`.
        err: the terminal, if it is one, on which to ask.

    Raises:
        ConfigError: a file of `--trust` can't be read.
        OutputError: an answer can't be kept.
    """
    with environment(variables_for(allowed_files(words or (), named or (), _asker(err)))):
        yield


def allowed_files(words: Sequence[str], named: Sequence[Path], ask: Ask | None) -> dict[str, str]:
    """Resolved path -> sha256 of the files that the command may load.

    Args:
        words: settings of the command line, `key=value`.
        named: files of `--trust`.
        ask: asks the user a question; None: there is no terminal.

    Raises:
        ConfigError: a file of `--trust` can't be read.
        OutputError: an answer can't be kept.
    """
    allowed = given_files(named, "--trust")
    known = _remembered()
    for path in _files_of(words):
        found = digest(path.read_bytes())
        if str(path) in allowed:
            continue
        if known.get(str(path)) == found:
            allowed[str(path)] = found
        elif ask is not None and ask(_question(path, found, changed=str(path) in known)):
            allowed[str(path)] = known[str(path)] = found
            _remember(known)
    return allowed


def remembered_file() -> Path:
    """The file that keeps what the user has allowed."""
    return platformdirs.user_state_path("rl-app-ppo", appauthor=False) / "trusted-files.json"


def _asker(err: Console) -> Ask | None:
    """What asks the user a question; None without a terminal to ask on."""
    if not (sys.stdin.isatty() and err.is_terminal):
        return None

    def ask(question: str) -> bool:
        try:
            err.print(f"{question} [y/N] ", markup=False, soft_wrap=True, end="")
            return err.input().strip().lower() in ("y", "yes")
        except EOFError:
            return False

    return ask


def _files_of(words: Sequence[str]) -> list[Path]:
    """The files that the words name in or below the current folder, where symbolic links end."""
    settings = [(key, value) for key, equals, value in (word.partition("=") for word in words) if equals]
    files = [one for key, value in settings for one in code_files(key, value)]
    paths = [Path(file).resolve() for file in files]
    return [path for path in dict.fromkeys(paths) if path.is_relative_to(Path.cwd()) and path.is_file()]


def _question(path: Path, sha256: str, *, changed: bool) -> str:
    what = "has changed since you allowed it" if changed else "runs as a part of the training"
    return f"{path} (sha256 {sha256[:12]}) {what}. Do you trust it?"


def _remembered() -> dict[str, str]:
    """Path -> sha256; empty if there is none, or it is damaged."""
    try:
        return msgspec.json.decode(remembered_file().read_bytes(), type=dict[str, str])
    except (OSError, msgspec.DecodeError, UnicodeError):
        return {}


def _remember(known: Mapping[str, str]) -> None:
    file = remembered_file()
    with write_errors(file, "The answer", "Use --trust instead of an answer."):
        file.parent.mkdir(parents=True, exist_ok=True)
        fresh = file.with_suffix(f".{os.getpid()}")
        fresh.write_bytes(msgspec.json.encode(known))
        fresh.chmod(0o600)
        fresh.replace(file)
