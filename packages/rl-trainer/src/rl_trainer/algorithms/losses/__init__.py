"""Policy losses by name: `POLICY_LOSSES.get("gspo")`. Importing this package does not import torch.

The driver checks a configuration by this table; the process that trains loads the function.
Packages add losses as entry points in the group `rl_trainer.policy_losses`, each a `PolicyLoss`.

In the modules: T response tokens of R trajectories lie flat, and `row` int64 [T] is the trajectory
of each token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import Any, Literal

from rl_protocol import ConfigError
from rl_protocol.errors import located_error
from rl_trainer.config.registry import Registry

GROUP = "rl_trainer.policy_losses"


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """A policy loss and what it requires of a run.

    Attributes:
        function: `module:name` of a `rl_trainer.algorithms.losses.loss_function.LossFunction`, or
            the function itself in a module that may import torch.
        off_policy: its ratio to the old policy corrects for samples of an older policy; False for
            the plain policy gradient.
        per_sequence: it has one loss per trajectory, so tokens can't be averaged over trajectories
            or weighted one by one.
        chooses: the token selection that it reads as the column `chosen_tokens`.
    """

    function: str | Callable[..., Any]
    off_policy: bool = True
    per_sequence: bool = False
    chooses: Literal["", "clip_cov", "kl_cov"] = ""

    def load(self) -> Any:
        """The function; imports torch.

        Raises:
            ConfigError: it can't be imported.
        """
        if not isinstance(self.function, str):
            return self.function
        try:
            return EntryPoint(name="", value=self.function, group=GROUP).load()
        except Exception as error:  # boundary to user code: importing it may raise anything
            raise ConfigError(f"The policy loss {self.function} can't be imported: {located_error(error)}.") from error


_HERE = "rl_trainer.algorithms.losses"

POLICY_LOSSES: Registry[PolicyLoss] = Registry(
    "PolicyLossConfig.loss_mode",
    GROUP,
    PolicyLoss,
    {
        "vanilla": PolicyLoss(f"{_HERE}.ppo:vanilla"),
        "gspo": PolicyLoss(f"{_HERE}.sequence_ratio.gspo:gspo"),
        "geo_mean": PolicyLoss(f"{_HERE}.sequence_ratio.gmpo:geo_mean", per_sequence=True),
        "cispo": PolicyLoss(f"{_HERE}.cispo:cispo"),
        "sapo": PolicyLoss(f"{_HERE}.sapo:sapo"),
        "gpg": PolicyLoss(f"{_HERE}.gpg:gpg", off_policy=False),
        "clip_cov": PolicyLoss(f"{_HERE}.clip_cov:clip_cov", chooses="clip_cov"),
        "kl_cov": PolicyLoss(f"{_HERE}.kl_cov:kl_cov", chooses="kl_cov"),
        "dppo_tv": PolicyLoss(f"{_HERE}.dppo:dppo_tv"),
        "dppo_kl": PolicyLoss(f"{_HERE}.dppo:dppo_kl"),
        "dro": PolicyLoss(f"{_HERE}.dro:dro"),
        "kimi_k15": PolicyLoss(f"{_HERE}.sequence_ratio.kimi_k15:kimi_k15", per_sequence=True),
        "topr": PolicyLoss(f"{_HERE}.sequence_ratio.topr:topr"),
        "luspo": PolicyLoss(f"{_HERE}.sequence_ratio.luspo:luspo", per_sequence=True),
        "vespo": PolicyLoss(f"{_HERE}.sequence_ratio.vespo:vespo"),
    },
    elsewhere={"ppo": "vanilla", "gmpo": "geo_mean", "reinforce": "gpg", "dppo": "dppo_tv", "kimi15": "kimi_k15"},
)
"""The names are verl's; `vanilla` is PPO and `geo_mean` is GMPO."""
