"""Scorers configured by a TOML file instead of code: `read_scorer_toml.name=judge.toml`.

    kind = "remote"                            kind = "model"
    url = "https://judge.example/score"        path = "models/reward"
    requests_per_s = 20.0

The fields are those of `RemoteScorerConfig` and `RewardModelConfig`. Like a file of code, a TOML
file is read only if the user allows it (`rl_protocol.support.trusted_files`), because it decides
where responses and keys are sent.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from rl_protocol import ConfigError
from rl_protocol.errors import UNREADABLE
from rl_protocol.support.trusted_files import read_trusted

SUFFIX = ".toml"


class RemoteScorerConfig(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="kind", tag="remote"
):
    """Settings of a service that scores over HTTP; see `rl_trainer.rewards.remote`."""

    url: str
    requests_per_s: float = 0.0
    """Largest number of requests started per second, including retries; 0: unlimited."""
    concurrency: int = 64
    """Largest number of samples in flight."""
    attempts: int = 4
    """Largest number of requests per sample."""
    key_variable: str = ""
    """Environment variable of the reward worker that is sent as the bearer token; empty: none."""


class RewardModelConfig(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="kind", tag="model"
):
    """Settings of a reward model; see `rl_trainer.backends.reward_model`."""

    path: str
    """Folder of a sequence classification model with one label and the policy's tokenizer."""
    device: str = "auto"
    """auto, cpu or cuda."""
    max_tokens: int = 16384
    """Tokens of a forward pass, including padding; a longer sequence gets its own pass."""


def is_scorer_toml(name: str) -> bool:
    """Whether the name of a reward is that of a TOML file."""
    return name.endswith(SUFFIX)


def read_scorer_toml(name: str, environment: Mapping[str, str] = os.environ) -> RemoteScorerConfig | RewardModelConfig:
    """Read and check the file.

    Raises:
        ConfigError: the file does not exist or may not be read, or a field is invalid. The message
            names the field.
    """
    _, content = read_trusted(name, "read_scorer_toml.name", environment)
    try:
        found = msgspec.toml.decode(content, type=RemoteScorerConfig | RewardModelConfig)
    except UNREADABLE as error:
        raise ConfigError(f"read_scorer_toml.name={name!r} can't be read: {error}.") from error
    wrong = _check_remote(found) if isinstance(found, RemoteScorerConfig) else _check_model(found)
    if wrong:
        raise ConfigError(f"read_scorer_toml.name={name!r}: {wrong}.")
    return found


def _check_remote(remote: RemoteScorerConfig) -> str:
    address = urlsplit(remote.url)
    if address.scheme not in ("http", "https") or not address.hostname:
        return "url must be http:// or https:// with a host"
    if address.username or address.password:
        return "url must not contain a password; put the key into an environment variable and name it in key_variable"
    if remote.key_variable and address.scheme == "http" and not _loopback(address.hostname):
        return "url must be https:// if a key (key_variable) is sent to another host"
    if remote.requests_per_s < 0:
        return f"requests_per_s must be at least 0; got {remote.requests_per_s}"
    if remote.concurrency < 1:
        return f"concurrency must be at least 1; got {remote.concurrency}"
    return "" if remote.attempts >= 1 else f"attempts must be at least 1; got {remote.attempts}"


def _check_model(model: RewardModelConfig) -> str:
    if not (Path(model.path).expanduser() / "config.json").is_file():
        return f"path={model.path!r} is not a folder with a config.json; set one that save_pretrained wrote"
    if model.device not in ("auto", "cpu", "cuda"):
        return f"device must be auto, cpu or cuda; got {model.device!r}"
    return "" if model.max_tokens >= 1 else f"max_tokens must be at least 1; got {model.max_tokens}"


def _loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
