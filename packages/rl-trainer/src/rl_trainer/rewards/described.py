"""Scorers that are described by a file instead of written as code: `reward.function=judge.toml`.

    kind = "remote"                            kind = "model"
    url = "https://judge.example/score"        path = "models/reward"
    requests_per_s = 20.0

The fields are those of `Remote` and `Model`. A description, like a file of code, is read only from the folders that RL_REWARD_PATH names: it decides
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
from rl_trainer.rewards.loading import allowed_path

SUFFIX = ".toml"


class Remote(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="kind", tag="remote"):
    """A service that is asked over HTTP, see `rl_trainer.rewards.remote`."""

    url: str
    requests_per_s: float = 0.0
    """Most requests that begin in a second, retries included; 0: any number."""
    concurrency: int = 64
    """Most samples that are under way at the same time."""
    attempts: int = 4
    """How often a sample is asked for, at most."""
    key_variable: str = ""
    """Environment variable, on the host of the reward worker, whose value is sent as `Authorization: Bearer ...`; empty: none."""


class Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="kind", tag="model"):
    """A reward model, see `rl_trainer.backends.reward_model`."""

    path: str
    """Folder of a transformers model for sequence classification with one label, over the same tokens as the policy."""
    device: str = "auto"
    """auto, cpu or cuda."""
    max_tokens: int = 16384
    """Most tokens of one forward pass, padding included; a longer sequence has one of its own."""


def is_described(name: str) -> bool:
    """Whether the name of a reward is that of a description."""
    return name.endswith(SUFFIX)


def read_description(name: str, environment: Mapping[str, str] = os.environ) -> Remote | Model:
    """Read and check it.

    Raises:
        ConfigError: it is not there or may not be read, or says something that can't be meant; names the field.
    """
    path = allowed_path(name, environment)
    try:
        found = msgspec.toml.decode(path.read_bytes(), type=Remote | Model)
    except (OSError, *UNREADABLE) as error:
        raise ConfigError(f"reward.function={name!r} can't be read: {error}.") from error
    wrong = _wrong_remote(found) if isinstance(found, Remote) else _wrong_model(found)
    if wrong:
        raise ConfigError(f"reward.function={name!r}: {wrong}.")
    return found


def _wrong_remote(remote: Remote) -> str:
    address = urlsplit(remote.url)
    if address.scheme not in ("http", "https") or not address.hostname:
        return "url must be http:// or https:// and a host"
    if address.username or address.password:
        return "url must not hold a password; put the key into an environment variable and name it in key_variable"
    if remote.key_variable and address.scheme == "http" and not _loopback(address.hostname):
        return "url must be https:// where a key is sent to another host (key_variable)"
    if remote.requests_per_s < 0:
        return f"requests_per_s must be at least 0; got {remote.requests_per_s}"
    if remote.concurrency < 1:
        return f"concurrency must be at least 1; got {remote.concurrency}"
    return "" if remote.attempts >= 1 else f"attempts must be at least 1; got {remote.attempts}"


def _wrong_model(model: Model) -> str:
    if not (Path(model.path).expanduser() / "config.json").is_file():
        return f"path={model.path!r} is no folder with a config.json; give one written by save_pretrained"
    if model.device not in ("auto", "cpu", "cuda"):
        return f"device must be auto, cpu or cuda; got {model.device!r}"
    return "" if model.max_tokens >= 1 else f"max_tokens must be at least 1; got {model.max_tokens}"


def _loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
