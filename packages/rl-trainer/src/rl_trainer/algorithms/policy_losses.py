"""Policy losses by name, without torch: the driver checks a configuration by this table, the process that trains loads the function.

Packages offer more as entry points in the group `rl_trainer.policy_losses`, each a `PolicyLoss`.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import Any, Literal

from rl_protocol import ConfigError
from rl_trainer.algorithms.registry import Registry

LOSS_AGG_MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")
GROUP = "rl_trainer.policy_losses"


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """A policy loss and what it asks of a run.

    Attributes:
        function: `module:name` of a `rl_trainer.algorithms.losses.base.LossFunction`.
        off_policy: its ratio to the old policy accounts for samples of an older policy; false for plain policy gradient.
        per_sequence: one loss per trajectory, so its tokens can only be averaged within it and weighted alike.
        chooses: which choice of tokens it reads as the column `chosen_tokens`; see `covariance`.
    """

    function: str
    off_policy: bool = True
    per_sequence: bool = False
    chooses: Literal["", "clip_cov", "kl_cov"] = ""

    def load(self) -> Any:
        """The function; imports torch.

        Raises:
            ConfigError: it can't be imported.
        """
        try:
            return EntryPoint(name="", value=self.function, group=GROUP).load()
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"The policy loss {self.function} can't be imported: {error}") from error


_TOKENWISE, _SEQUENCE = "rl_trainer.algorithms.losses.tokenwise:", "rl_trainer.algorithms.losses.sequence:"

POLICY_LOSSES: Registry[PolicyLoss] = Registry(
    "actor.policy_loss.loss_mode",
    GROUP,
    PolicyLoss,
    {
        "vanilla": PolicyLoss(_TOKENWISE + "vanilla"),
        "gspo": PolicyLoss(_SEQUENCE + "gspo"),
        "geo_mean": PolicyLoss(_SEQUENCE + "geo_mean", per_sequence=True),
        "cispo": PolicyLoss(_TOKENWISE + "cispo"),
        "sapo": PolicyLoss(_TOKENWISE + "sapo"),
        "gpg": PolicyLoss(_TOKENWISE + "gpg", off_policy=False),
        "clip_cov": PolicyLoss(_TOKENWISE + "clip_cov", chooses="clip_cov"),
        "kl_cov": PolicyLoss(_TOKENWISE + "kl_cov", chooses="kl_cov"),
        "dppo_tv": PolicyLoss(_TOKENWISE + "dppo_tv"),
        "dppo_kl": PolicyLoss(_TOKENWISE + "dppo_kl"),
    },
    elsewhere={"ppo": "vanilla", "gmpo": "geo_mean", "reinforce": "gpg", "dppo": "dppo_tv"},
)
"""verl's names; `vanilla` is PPO, `geo_mean` is GMPO."""
