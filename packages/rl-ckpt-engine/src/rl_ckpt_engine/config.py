"""Settings of weight synchronization."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from rl_protocol.errors import ConfigError
from rl_protocol.support.options import Options, option
from rl_protocol.support.trusted_files import names_file

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*(:[A-Za-z_]\w*)?")


@dataclass(frozen=True, kw_only=True)
class CheckpointEngineConfig(Options):
    """Settings of weight synchronization from trainer to rollout.

    Raises:
        ConfigError: a value is invalid; says what to set.
    """

    backend: str = option(
        "shm",
        "engine that moves the weights, or delta-<engine>, which sends only changed elements",
        plugins="rl_ckpt_engine.backends",
    )
    enabled: bool = option(
        True, "send new weights to the rollout; false: it keeps the initial weights, and the run says so"
    )
    timeout_s: float = option(60.0, "deadline in seconds of each phase: send, receive, activate", gt=0, lt=math.inf)

    bucket_mb: float = option(
        64.0, "engines that copy: MiB per request; two requests are in flight at any time", gt=0, lt=math.inf
    )
    prefetch: bool = option(
        True,
        "engines shm-copy and tcp: replicas receive while the trainer still sends, which takes less time; false: afterwards, which takes less CPU "
        "time where both ends share few memory channels",
    )
    listen: str = option(
        "127.0.0.1",
        "engines tcp, gloo and nccl: address the sender listens at; any but loopback needs a key (RL_CKPT_KEY_FILE) with tcp, and with the "
        "others, which have no keys, RL_CKPT_TRUSTED_NETWORK=1. In an app on several hosts loopback stands for the address of the sender's host",
    )
    directory: str = option("", "engine disk: folder that the sender and all receivers see; versions are put there")

    custom_backend_module: str = option(
        "",
        "plug-in that offers the engine `backend`: name of an allowed entry point, path of an allowed module that registers it, or path.py:Class",
    )
    checkpoint_manager_class: str = option(
        "",
        "plug-in that replaces the manager: name of an allowed entry point, package.module.Class of an allowed package, or path.py:Class",
    )

    def check(self, path: str) -> None:
        if not _NAME.fullmatch(self.backend):
            raise ConfigError(
                f"{path}backend must be a short name of letters, digits, '_' and '-'; got {self.backend!r}. "
                "Module paths are not accepted: install the package that offers the engine and set its name."
            )
        for name in ("custom_backend_module", "checkpoint_manager_class"):
            value: str = getattr(self, name)
            if value and not (_NAME.fullmatch(value) or _PATH.fullmatch(value) or names_file(value)):
                raise ConfigError(
                    f"{path}{name} must be the short name of a plug-in, the path of its module, or path.py:Class; got {value!r}."
                )

    @property
    def bucket_bytes(self) -> int:
        """`bucket_mb` in bytes, at least 1."""
        return max(1, int(self.bucket_mb * (1 << 20)))
