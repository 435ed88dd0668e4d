"""Scorers configured by a TOML file instead of code: `read_scorer_toml.name=judge.toml`.

    kind = "remote"                            kind = "model"
    url = "https://judge.example/score"        path = "models/reward"
    requests_per_s = 20.0

The fields are those of `RemoteScorerConfig`, `JudgeConfig`, `ServedModelConfig` and
`RewardModelConfig`. Like a file of code, a TOML file is read only if the user allows it
(`rl_protocol.support.trusted_files`), because it decides where responses and keys are sent.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import msgspec

from rl_protocol import ConfigError
from rl_protocol.errors import UNREADABLE
from rl_protocol.support.trusted_files import read_trusted

SUFFIX = ".toml"
ScorerConfig: TypeAlias = "RemoteScorerConfig | JudgeConfig | ServedModelConfig | RewardModelConfig"
"""What a file may describe."""


class ServiceConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a service that is asked over HTTP."""

    url: str
    requests_per_s: float = 0.0
    """Largest number of requests started per second, including retries; 0: unlimited."""
    concurrency: int = 64
    """Largest number of samples in flight."""
    attempts: int = 4
    """Largest number of requests per sample."""
    timeout_s: float = 0.0
    """Time limit of a sample with its retries, not counting the wait for a slot; 0: that of all
    rewards.
    """
    key_variable: str = ""
    """Environment variable of the reward worker that is sent as the bearer token; empty: none."""


class RemoteScorerConfig(
    ServiceConfig, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="kind", tag="remote"
):
    """Settings of a service that scores over HTTP; see `rl_trainer.rewards.services.remote`."""


class JudgeConfig(ServiceConfig, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="kind", tag="judge"):
    """Settings of a language model that scores; see `rl_trainer.rewards.services.judge`.

    `url` is the base URL of OpenAI's API, such as http://127.0.0.1:8000/v1.
    """

    model: str
    """Name of the model that the service has."""
    rubric: str
    """The question, in which {prompt}, {response}, {ground_truth} and {data_source} stand for the
    texts of a sample; {response} must be in it.
    """
    score_pattern: str = r"(?i)\bscore(?:\s*\([^()]*\d\s*(?:-|–|to)\s*\d[^()]*\))?[^\w-]*(-?\d+(?:\.\d+)?)"
    """Regular expression whose last match in an answer has the score as group 1. The default skips
    a scale, as in `Score (0-10): 8`.
    """
    score_field: str = ""
    """Field of the JSON object in an answer that is the score; its other numbers are reported, too.
    Empty: score_pattern finds it.
    """
    lowest: float = 0.0
    """Lowest score of the rubric, which becomes 0."""
    highest: float = 10.0
    """Highest score of the rubric, which becomes 1."""
    max_tokens: int = 512
    """Most tokens of an answer."""
    temperature: float = 0.0
    request: dict[str, Any] = {}
    """Further fields of each request, such as response_format."""
    cache: str = ""
    """SQLite file of the answers so far, on a local disk of the reward worker; empty: none. A
    relative path is relative to the folder of this file.
    """


class ServedModelConfig(
    ServiceConfig, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="kind", tag="served_model"
):
    """Settings of a reward model that vLLM serves; see `rl_trainer.rewards.services.served_model`.

    `url` is the base URL of the server, such as http://127.0.0.1:8001.
    """

    model: str
    """Name of the model that the server has: a sequence classification model with one label and the
    policy's tokenizer.
    """


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


def read_scorer_toml(name: str, environment: Mapping[str, str] = os.environ) -> ScorerConfig:
    """Read and check the file.

    Raises:
        ConfigError: the file does not exist or may not be read, or a field is invalid. The message
            names the field.
    """
    path, content = read_trusted(name, "read_scorer_toml.name", environment)
    try:
        found = msgspec.toml.decode(
            content, type=RemoteScorerConfig | JudgeConfig | ServedModelConfig | RewardModelConfig
        )
    except UNREADABLE as error:
        raise ConfigError(f"read_scorer_toml.name={name!r} can't be read: {error}.") from error
    wrong = _check_model(found) if isinstance(found, RewardModelConfig) else _check_service(found)
    if isinstance(found, JudgeConfig):
        found = msgspec.structs.replace(found, cache=found.cache and str(path.parent / Path(found.cache).expanduser()))
        wrong = wrong or _check_judge(found)
    if wrong:
        raise ConfigError(f"read_scorer_toml.name={name!r}: {wrong}.")
    return found


def _check_service(service: ServiceConfig) -> str:
    address = urlsplit(service.url)
    if address.scheme not in ("http", "https") or not address.hostname:
        return "url must be http:// or https:// with a host"
    if address.username or address.password:
        return "url must not contain a password; put the key into an environment variable and name it in key_variable"
    if service.key_variable and address.scheme == "http" and not _loopback(address.hostname):
        return "url must be https:// if a key (key_variable) is sent to another host"
    if service.requests_per_s < 0:
        return f"requests_per_s must be at least 0; got {service.requests_per_s}"
    if service.concurrency < 1:
        return f"concurrency must be at least 1; got {service.concurrency}"
    if not 0 <= service.timeout_s < math.inf:
        return f"timeout_s must be at least 0 and finite; got {service.timeout_s}"
    return "" if service.attempts >= 1 else f"attempts must be at least 1; got {service.attempts}"


def _check_judge(judge: JudgeConfig) -> str:
    if "{response}" not in judge.rubric:
        return "rubric must have {response} where the response goes"
    try:
        groups = re.compile(judge.score_pattern).groups
    except re.error as error:
        return f"score_pattern is not a regular expression: {error}"
    if groups < 1:
        return f"score_pattern must have a group for the score; got {judge.score_pattern!r}"
    if not judge.lowest < judge.highest:
        return f"lowest must be less than highest; got {judge.lowest} and {judge.highest}"
    if judge.cache and not Path(judge.cache).parent.is_dir():
        return f"cache={judge.cache!r} must be in a folder that exists"
    if judge.temperature < 0:
        return f"temperature must be at least 0; got {judge.temperature}"
    return "" if judge.max_tokens >= 1 else f"max_tokens must be at least 1; got {judge.max_tokens}"


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
