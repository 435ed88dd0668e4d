"""The loss of the policy: policy loss, importance weights, KL divergence and entropy bonus."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rl_protocol import BatchError, ConfigError, RLError
from rl_protocol.errors import user_code
from rl_trainer.algorithms.arrays import sum_by
from rl_trainer.algorithms.losses import POLICY_LOSSES
from rl_trainer.algorithms.losses.aggregate import BatchCounts, add_masked, aggregate
from rl_trainer.algorithms.losses.kl_loss import kl_loss, topk_kl
from rl_trainer.algorithms.losses.loss_function import LossFunction, LossInputs, TokenLoss
from rl_trainer.algorithms.metrics import WeightedMeans
from rl_trainer.algorithms.rollout_correction import MaskedRows, importance_weights, reject
from rl_trainer.config import ActorConfig, RolloutCorrectionConfig


@dataclass(frozen=True, kw_only=True)
class TokenColumns:
    """Columns of a micro-batch of `rows` complete trajectories, flat: T response tokens.

    A token's loss has three parts, each with a weight of the token's own: `rl`, the policy loss;
    `ce`, the cross-entropy -log pi; and `ref_kl`, the divergence from the reference. Without a
    column of weights, those of `rl` and `ref_kl` are 1 where the part is computed, and that of `ce`
    is 0.

    Attributes:
        old_log_prob: [T] before the update, or those of the rollout engine; None: there are no
            advantages.
        interpolation: [T] part of the way from these to `log_prob` at which the old log-probs are;
            None: 0.
        advantages: [T]; None: the loss has no part `rl`.
        mask: bool [T].
        row: int64 [T].
        rows: number of trajectories.
        ref_log_prob: [T], required with use_kl_loss.
        ref_top_log_probs, top_tokens: [T, K] the largest log-probs of the reference, and the tokens
            that have them; required with kl_loss_topk.
        rl_weights, ce_weights, ref_kl_weights: [T] of the parts.
        weights: [T] importance weights of the rollout correction; None: all 1.
        chosen: bool [T], required by losses that select tokens (Clip-Cov, KL-Cov).
    """

    old_log_prob: torch.Tensor | None
    advantages: torch.Tensor | None
    mask: torch.Tensor
    row: torch.Tensor
    rows: int
    ref_log_prob: torch.Tensor | None = None
    weights: torch.Tensor | None = None
    chosen: torch.Tensor | None = None
    interpolation: torch.Tensor | None = None
    rl_weights: torch.Tensor | None = None
    ce_weights: torch.Tensor | None = None
    ref_kl_weights: torch.Tensor | None = None
    ref_top_log_probs: torch.Tensor | None = None
    top_tokens: torch.Tensor | None = None

    @property
    def imitated(self) -> torch.Tensor:
        """bool [T], true for tokens with cross-entropy and no policy loss, such as answers of the
        data and observations."""
        if self.rl_weights is None or self.ce_weights is None:
            return torch.zeros_like(self.mask)
        return (self.ce_weights != 0) & (self.rl_weights == 0)

    def require_old_log_prob(self) -> torch.Tensor:
        """`old_log_prob`.

        Raises:
            BatchError: it is None.
        """
        if self.old_log_prob is None:
            raise BatchError("A policy loss needs the column old_log_probs beside advantages; got none.")
        return self.old_log_prob

    def interpolated(self, log_prob: torch.Tensor) -> torch.Tensor:
        """The old log-probs [T], without gradient; `log_prob` [T] is that of the trained policy."""
        old = self.require_old_log_prob()
        return old if self.interpolation is None else torch.lerp(old, log_prob.detach(), self.interpolation)

    def require_ref_log_prob(self) -> torch.Tensor:
        """`ref_log_prob`.

        Raises:
            BatchError: it is None.
        """
        if self.ref_log_prob is None:
            raise BatchError(
                "ActorConfig.use_kl_loss=true needs the column ref_log_prob, which the ref stage writes; got none."
            )
        return self.ref_log_prob


class PolicyObjective:
    """aggregate(rl * policy loss + ce * -log pi + ref_kl * kl_loss_coef * divergence
    - entropy_coeff * entropy), with the weights of each token.

    Computed as a micro-batch's share of its mini-batch. Any backend can call it. It does not know
    the algorithm, which is in the columns.

    Args:
        config: the actor's settings.
        correction: rollout correction to make here, where `old_log_prob` are the rollout engine's;
            None: none.

    Raises:
        ConfigError: unknown policy loss.
    """

    def __init__(self, config: ActorConfig, correction: RolloutCorrectionConfig | None = None) -> None:
        self._config = config
        self._correction = correction
        self._function: LossFunction = POLICY_LOSSES.get(config.policy_loss.loss_mode).load()

    def __call__(
        self,
        log_prob: torch.Tensor,
        entropy: torch.Tensor,
        tokens: TokenColumns,
        counts: BatchCounts,
        means: WeightedMeans,
        top_log_prob: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The micro-batch's share of the loss; adds metrics to `means`.

        Args:
            log_prob: [T] of each token, with gradient.
            entropy: [T] of each distribution, nats, with gradient.
            tokens: the other columns.
            counts: sizes of the whole mini-batch, before any rejection made here, so
                that the result does not depend on how the mini-batch is split.
            means: token means over the mini-batches, weighted by their unmasked tokens.
            top_log_prob: [T, K] of `tokens.top_tokens`, with gradient; required with kl_loss_topk.
        """
        config, mask = self._config, tokens.mask
        per_token = torch.zeros_like(log_prob)
        if tokens.advantages is not None:
            per_token, mask = self._policy_loss(log_prob, tokens.advantages, tokens, means)
        if tokens.ce_weights is not None:
            per_token = per_token - tokens.ce_weights * log_prob
            add_masked(means, {"ce_loss": -log_prob}, tokens.mask & (tokens.ce_weights != 0))
        generated = mask if tokens.advantages is None else mask & ~tokens.imitated
        add_masked(means, {"entropy_loss": entropy}, generated)
        if config.entropy_coeff:
            per_token = per_token - config.entropy_coeff * torch.where(generated, entropy, 0.0)
        if config.use_kl_loss:
            divergence = self._divergence(log_prob, top_log_prob, tokens)
            weights = tokens.ref_kl_weights
            add_masked(means, {"kl_loss": divergence}, mask if weights is None else mask & (weights != 0))
            per_token = per_token + config.kl_loss_coef * (divergence if weights is None else weights * divergence)
        return aggregate(
            per_token, mask, tokens.row, tokens.rows, counts, config.loss_agg_mode, config.loss_scale_factor
        )

    def _divergence(
        self, log_prob: torch.Tensor, top_log_prob: torch.Tensor | None, tokens: TokenColumns
    ) -> torch.Tensor:
        """The divergence from the reference [T]."""
        if not self._config.kl_loss_topk:
            return kl_loss(log_prob, tokens.require_ref_log_prob(), self._config.kl_loss_type)
        if top_log_prob is None or tokens.ref_top_log_probs is None:
            raise BatchError(
                "ActorConfig.kl_loss_topk needs the columns ref_top_log_probs and ref_top_tokens, which the ref stage writes, and the policy's "
                "log-probs of these tokens; got none."
            )
        return topk_kl(top_log_prob, tokens.ref_top_log_probs)

    def _policy_loss(
        self, log_prob: torch.Tensor, advantages: torch.Tensor, tokens: TokenColumns, means: WeightedMeans
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The part `rl` of each token [T], and the mask without rejected tokens."""
        mask, weights, old = tokens.mask, tokens.weights, tokens.interpolated(log_prob)
        if self._correction is not None:
            corrected = log_prob if tokens.interpolation is None else old
            mask, weights = self._correct(self._correction, corrected, tokens, means)
        own = mask if tokens.rl_weights is None else mask & (tokens.rl_weights != 0)
        inputs = LossInputs(
            log_prob=log_prob,
            old_log_prob=old,
            advantages=advantages,
            mask=own,
            row=tokens.row,
            rows=tokens.rows,
            config=self._config,
            chosen=tokens.chosen,
        )
        out = _checked(self._config.policy_loss.loss_mode, self._token_loss(inputs), log_prob)
        per_token = out.loss if weights is None else out.loss * weights
        add_masked(means, {"pg_loss": per_token, **out.metrics, "ppo_kl": -inputs.log_ratio()}, own)
        if tokens.rl_weights is not None:
            per_token = torch.where(own, tokens.rl_weights * per_token, torch.zeros_like(per_token))
        return per_token, mask

    def _token_loss(self, inputs: LossInputs) -> object:
        name = self._config.policy_loss.loss_mode
        with user_code(lambda raised: RLError(f"PolicyLossConfig.loss_mode={name!r} raised {raised}.")):
            return self._function(inputs)

    def _correct(
        self, correction: RolloutCorrectionConfig, log_prob: torch.Tensor, tokens: TokenColumns, means: WeightedMeans
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Mask and weights from a policy against the rollout's, without gradient, and within each
        trajectory.

        The policy is the one being trained, or with interpolated log-probs the old one: decoupled
        PPO (Hilton et al. 2021, arXiv:2110.00641) weighs a ratio to it.
        """
        log_ratio = (log_prob - tokens.require_old_log_prob()).detach().double().cpu().numpy()
        mask, row = tokens.mask.cpu().numpy(), tokens.row.cpu().numpy()
        rows = MaskedRows(mask=mask, row=row, count=sum_by(row, mask, tokens.rows))
        kept, _ = reject(log_ratio, rows, correction.rejections())
        keep, weights = torch.from_numpy(kept).to(tokens.mask.device), None
        report = {"kl": -torch.from_numpy(log_ratio)}
        if correction.rollout_rs:
            report["rollout_rs_masked_fraction"] = ~torch.from_numpy(kept)
        if correction.rollout_is:
            values, _ = importance_weights(log_ratio, rows, correction.rollout_is, correction.is_bounds())
            weights = torch.from_numpy(values).to(log_prob)
            report["rollout_is_mean"] = torch.from_numpy(values)
        add_masked(means, {f"rollout_corr/{name}": value for name, value in report.items()}, tokens.mask.cpu())
        return keep, weights


def _checked(name: str, returned: object, log_prob: torch.Tensor) -> TokenLoss:
    """What a policy loss returned, if it is a TokenLoss of these tokens [T]."""
    if isinstance(returned, TokenLoss):
        parts = {"the loss": returned.loss, **{f"the metric {one!r}": of for one, of in returned.metrics.items()}}
        wrong = next((f"{part} {form}" for part, of in parts.items() if (form := _other_form(of, log_prob))), "")
        if not wrong:
            return returned
    else:
        wrong = f"got {type(returned).__name__}"
    raise ConfigError(
        f"PolicyLossConfig.loss_mode={name!r} must return a TokenLoss, with a number for each of the {len(log_prob)} tokens; {wrong}."
    )


def _other_form(values: object, log_prob: torch.Tensor) -> str:
    """What values are that are no tensor of these tokens [T]; empty if they are one."""
    if not isinstance(values, torch.Tensor):
        return f"is of type {type(values).__name__}"
    return f"has the shape {tuple(values.shape)}" if values.shape != log_prob.shape else ""
