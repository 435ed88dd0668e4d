"""The files that a run reads, data and code, with their digests."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rl_app_ppo.config.loading import flat_settings, to_yaml
from rl_app_ppo.config.schema import AppConfig
from rl_app_ppo.inputs.code_files import code_files
from rl_protocol import ConfigError
from rl_protocol.support.trusted_files import trusted_files
from rl_trainer.data.validation_split import PreparedPrompts

Digests = Mapping[str, Mapping[str, str]]
"""SHA-256 of files, by the key that names them and by path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFiles:
    """The files of a run when it starts.

    Files that these name, such as images of rows and modules that code imports, are not among them.
    """

    data: Digests = field(default_factory=dict[str, Mapping[str, str]])
    """Of data.train_files and data.val_files; paths as they are set."""
    code: Digests = field(default_factory=dict[str, Mapping[str, str]])
    """Of code that the user allows, and that settings name; resolved paths."""

    @property
    def digests(self) -> Digests:
        """Of all files."""
        return {**self.data, **self.code}


def input_files(config: AppConfig, data: Mapping[str, PreparedPrompts]) -> InputFiles:
    """The files of a configuration.

    Digests of data files are those of their preparation, so the files are not read again.

    Args:
        config: the configuration of the run.
        data: the prompts by split, as `open_data` gives them.
    """
    return InputFiles(data=dict(_data(config, data)), code=_code(config))


def check_data(config: AppConfig, data: Mapping[str, PreparedPrompts], given: Digests) -> None:
    """Check that this process has opened the data files of the run, whose rows it gets by number.

    Args:
        config: the configuration of the run.
        data: the prompts by split, as `open_data` gives them here.
        given: digests of the data files of the run.

    Raises:
        ConfigError: the content of a file differs.
    """
    for key, name in differing(given, dict(_data(config, data))):
        raise ConfigError(
            f"{key}: {name} on {socket.gethostname()} is not the file that the driver opened when the run started: its content differs. "
            "Put that file back on all hosts, and resume the run."
        )


def differing(before: Digests, now: Digests) -> list[tuple[str, str]]:
    """Key and path of the files that are in both and whose digests differ."""
    return [
        (key, name)
        for key, files in now.items()
        for name, digest in files.items()
        if before.get(key, {}).get(name, digest) != digest
    ]


def _data(config: AppConfig, data: Mapping[str, PreparedPrompts]) -> Iterator[tuple[str, Mapping[str, str]]]:
    for split in ("train", "val"):
        if names := config.data.files(split):
            found = zip(names, data[split].digests_of_files, strict=True)
            yield f"data.{split}_files", {name: digest for name, digest in found if digest}


def _code(config: AppConfig) -> Digests:
    allowed, found = trusted_files(), dict[str, dict[str, str]]()
    for key, value in flat_settings(to_yaml(config)).items():
        for word in value if isinstance(value, list) else [value]:
            paths = [str(Path(file).expanduser().resolve()) for file in code_files(key, str(word))]
            if digests := {path: allowed[path] for path in paths if path in allowed}:
                found.setdefault(key, {}).update(digests)
    return found
