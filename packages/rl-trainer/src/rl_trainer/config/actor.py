"""Options of the policy under training and its loss."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rl_protocol.support.options import Options, group, option, require
from rl_trainer.config.kl import KL_LOSSES, KL_PENALTIES, kl_name
from rl_trainer.config.optim import UpdateConfig

LOSS_AGG_MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")
_CLIPS = (
    "algorithm.trains_policy",
    "policy_loss.loss_mode=vanilla|gspo|geo_mean|cispo|clip_cov|dppo_tv|dppo_kl|luspo",
)
"""What reads the clip range."""


@dataclass(frozen=True, kw_only=True)
class PolicyLossConfig(Options):
    """The policy loss and its options."""

    loss_mode: str = option(
        "vanilla",
        "policy loss (vanilla is that of PPO, geo_mean that of GMPO)",
        plugins="rl_trainer.policy_losses",
    )
    clip_cov_ratio: float = option(
        0.0002,
        "clip_cov: share of the tokens that lose their gradient",
        gt=0,
        le=1,
        needs="loss_mode=clip_cov",
        verl=".",
    )
    clip_cov_lb: float = option(
        1.0, "clip_cov: least covariance of a token that can lose its gradient", needs="loss_mode=clip_cov", verl="."
    )
    clip_cov_ub: float = option(
        5.0, "clip_cov: largest covariance of a token that can lose its gradient", needs="loss_mode=clip_cov", verl="."
    )
    kl_cov_ratio: float = option(
        0.0002, "kl_cov: share of the tokens with a KL penalty", gt=0, le=1, needs="loss_mode=kl_cov", verl="."
    )
    ppo_kl_coef: float = option(
        0.1, "kl_cov: KL penalty coefficient", ge=0, lt=math.inf, needs="loss_mode=kl_cov", verl="."
    )
    dro_beta: float = option(
        0.1, "dro: weight of the squared log-ratio of each token", gt=0, lt=math.inf, needs="loss_mode=dro", verl="."
    )
    kimi_tau: float = option(
        0.1, "kimi_k15: weight of the squared log-ratio of a response", ge=0, lt=math.inf, needs="loss_mode=kimi_k15"
    )
    vespo_k_pos: float = option(
        2.0, "vespo: power of the ratio where the advantage is at least 0", gt=0, lt=math.inf, needs="loss_mode=vespo"
    )
    vespo_lambda_pos: float = option(
        3.0,
        "vespo: decay of the weight with the ratio where the advantage is at least 0",
        gt=0,
        lt=math.inf,
        needs="loss_mode=vespo",
    )
    vespo_k_neg: float = option(
        3.0, "vespo: power of the ratio where the advantage is negative", gt=0, lt=math.inf, needs="loss_mode=vespo"
    )
    vespo_lambda_neg: float = option(
        2.0,
        "vespo: decay of the weight with the ratio where the advantage is negative",
        gt=0,
        lt=math.inf,
        needs="loss_mode=vespo",
    )

    def check(self, path: str) -> None:
        require(
            self.clip_cov_lb < self.clip_cov_ub,
            f"{path}clip_cov_lb",
            f"below clip_cov_ub ({self.clip_cov_ub})",
            self.clip_cov_lb,
        )


@dataclass(frozen=True, kw_only=True)
class ActorConfig(UpdateConfig):
    """The policy under training and its loss."""

    policy_loss: PolicyLossConfig = group(
        PolicyLossConfig, "loss of the policy", needs="algorithm.trains_policy", verl="."
    )
    clip_ratio_low: float = option(
        0.2,
        "lower clip of the probability ratio: 1 - this (geo_mean: of its logarithm; dppo_*: of the divergence)",
        gt=0,
        lt=1,
        needs=_CLIPS,
        verl=".",
    )
    clip_ratio_high: float = option(
        0.2,
        "upper clip of the probability ratio: 1 + this (geo_mean: of its logarithm; dppo_*: of the divergence)",
        gt=0,
        needs=_CLIPS,
        verl=".",
    )
    clip_ratio_c: float = option(
        3.0,
        "vanilla: bound of the loss where the advantage is negative (dual clip); dppo_*: largest weight of a token",
        gt=1,
        needs="policy_loss.loss_mode=vanilla|dppo_tv|dppo_kl",
        verl=".",
    )
    tau_pos: float = option(
        1.0,
        "sapo: temperature of the gate where the advantage is positive",
        gt=0,
        lt=math.inf,
        needs="policy_loss.loss_mode=sapo",
        verl=".",
    )
    tau_neg: float = option(
        1.05, "sapo: temperature of the gate elsewhere", gt=0, lt=math.inf, needs="policy_loss.loss_mode=sapo", verl="."
    )
    loss_agg_mode: str = option("token-mean", "how token losses become one number", choices=LOSS_AGG_MODES, verl=".")
    loss_scale_factor: int = option(
        0,
        "tokens by which seq-mean-token-sum-norm divides, such as RolloutConfig.response_length",
        needs="loss_agg_mode=seq-mean-token-sum-norm",
        verl=".",
    )
    entropy_coeff: float = option(0.0, "weight of the entropy bonus in the loss", lt=math.inf, verl=".")
    use_kl_loss: bool = option(False, "add the divergence from the reference policy to the loss", verl=".")
    kl_loss_coef: float = option(
        0.001, "weight of the divergence in the loss", ge=0, lt=math.inf, needs="use_kl_loss", verl="."
    )
    kl_loss_type: str = option(
        "k3",
        f"estimator of the divergence in the loss: {', '.join(KL_PENALTIES)}; with the suffix + it has the gradient of k2",
        needs=("use_kl_loss", "kl_loss_topk=0"),
    )
    kl_loss_topk: int = option(
        0,
        "compute the divergence in the loss over this many most probable tokens of the reference, with all others as one more token; "
        "0: estimate it from the sampled token",
        ge=0,
        needs="use_kl_loss",
    )

    def check(self, path: str) -> None:
        super().check(path)
        require(
            self.loss_scale_factor >= 1 or self.loss_agg_mode != "seq-mean-token-sum-norm",
            f"{path}loss_scale_factor",
            "at least 1 with loss_agg_mode=seq-mean-token-sum-norm, for instance RolloutConfig.response_length",
            self.loss_scale_factor,
        )
        kl_name(self.kl_loss_type, KL_LOSSES, f"{path}kl_loss_type")
