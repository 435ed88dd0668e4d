"""Settings of weight synchronisation."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

from rl_protocol.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*(:[A-Za-z_]\w*)?")


@dataclass(frozen=True, kw_only=True)
class CheckpointEngineConfig:
    """How weights go from trainer to rollout.

    Raises:
        ConfigError: a value that can't be used; says what to set.
    """

    backend: str = field(
        default="shm",
        metadata={
            "help": "short name of an engine: naive, shm, tcp, disk, gloo, nccl, ray, nixl, mooncake, cuda_ipc, that of a package, or delta-<engine>"
        },
    )
    enabled: bool = field(default=True, metadata={"help": "false: rollout keeps the initial weights; the run says so"})
    timeout_s: float = field(
        default=60.0,
        metadata={"help": "deadline in seconds of each phase: send, receive, activate"},
    )

    bucket_mb: float = field(
        default=64.0,
        metadata={"help": "engines that copy: MiB asked for at once; two buckets are on their way at any time"},
    )
    listen: str = field(
        default="127.0.0.1",
        metadata={"help": "engine tcp: address the sender listens at; any but loopback needs a key (RL_CKPT_KEY_FILE)"},
    )
    directory: str = field(
        default="",
        metadata={"help": "engine disk: folder that the sender and all receivers see; versions are put there"},
    )

    custom_backend_module: str = field(
        default="",
        metadata={
            "help": "plug-in that offers the engine `backend`: name of an allowed entry point, or path of an allowed module that registers it"
        },
    )
    checkpoint_manager_class: str = field(
        default="",
        metadata={
            "help": "plug-in that replaces the manager: name of an allowed entry point, or package.module.Class of an allowed package"
        },
    )

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.backend):
            raise ConfigError(
                f"checkpoint_engine.backend must be a short name of letters, digits, '_' and '-'; got {self.backend!r}. "
                "Module paths are not accepted: install the package that offers the engine and set its name."
            )
        for key in ("custom_backend_module", "checkpoint_manager_class"):
            value: str = getattr(self, key)
            if value and not (_NAME.fullmatch(value) or _PATH.fullmatch(value)):
                raise ConfigError(
                    f"checkpoint_engine.{key} must be the short name of a plug-in, or the path of its module; got {value!r}."
                )
        if not (math.isfinite(self.timeout_s) and self.timeout_s > 0):
            raise ConfigError(
                f"checkpoint_engine.timeout_s must be a finite number of seconds above 0; got {self.timeout_s}. The default is 60."
            )
        if not (math.isfinite(self.bucket_mb) and self.bucket_mb > 0):
            raise ConfigError(
                f"checkpoint_engine.bucket_mb must be a finite number of MiB above 0; got {self.bucket_mb}. The default is 64."
            )

    @property
    def bucket_bytes(self) -> int:
        """`bucket_mb` in bytes, at least 1."""
        return max(1, int(self.bucket_mb * (1 << 20)))
