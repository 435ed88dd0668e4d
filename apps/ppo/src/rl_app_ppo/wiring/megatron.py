"""The policy on Megatron-Core with the trainer's loss: where rl-megatron-peft and rl-trainer meet. Imports torch and Megatron."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

import rl_trainer
from rl_app_ppo.schema import AppConfig
from rl_megatron_peft import Layout, LoraConfig
from rl_megatron_peft.backend.optimise import AdamConfig
from rl_megatron_peft.backend.parallel import open_ranks
from rl_megatron_peft.backend.policy import MegatronPolicyBackend, MiniBatchCounts, Reported
from rl_protocol import BatchData
from rl_protocol.torch import TORCH_DTYPES
from rl_trainer.algorithms.batching import schedule_rows
from rl_trainer.algorithms.losses import BatchCounts, PolicyObjective
from rl_trainer.algorithms.schedules import lr_factor
from rl_trainer.backends.engine import resolve_device
from rl_trainer.backends.tokens import lengths_of, token_columns
from rl_trainer.backends.world import join_world
from rl_trainer.metrics import WeightedMeans


class TrainerLoss:
    """PolicyLoss of the Megatron backend over the trainer's objective."""

    def __init__(self, objective: PolicyObjective) -> None:
        self._objective = objective

    def __call__(
        self, log_prob: torch.Tensor, entropy: torch.Tensor, micro: BatchData, counts: MiniBatchCounts
    ) -> tuple[torch.Tensor, Reported]:
        """See rl_megatron_peft.backend.policy.PolicyLoss."""
        lengths = torch.from_numpy(micro.ragged("responses").lengths).to(log_prob.device)
        row = torch.arange(len(micro), device=log_prob.device).repeat_interleave(lengths)
        means = WeightedMeans()
        sizes = BatchCounts(tokens=counts.tokens, sequences=counts.sequences)
        share = self._objective(log_prob, entropy, token_columns(micro, row), sizes, means)
        return share, means.parts()


def _adapters(lora: rl_trainer.LoraConfig) -> LoraConfig:
    return LoraConfig(
        rank=lora.rank,
        alpha=lora.alpha,
        target_modules=lora.targets(),
        exclude=lora.excluded(),
        dropout=lora.dropout,
        use_dora=lora.use_dora,
    )


def megatron_policy(config: AppConfig, path: Path, *, rank: int, store: Path) -> MegatronPolicyBackend:
    """This rank's part of the policy, after it has met the others through the file `store`.

    Raises:
        ConfigError: a model or layout that Megatron-Core can't hold here; names the setting.
    """
    join_world(rank, config.ranks, store=store, device=resolve_device("auto"), timeout_s=config.trainer.stage_timeout_s)
    megatron, actor = config.megatron, config.actor
    layout = Layout(tensor=megatron.tensor_model_parallel_size, pipeline=megatron.pipeline_model_parallel_size)
    schedule, optim = actor.schedule(config.rollout.n, config.trainer.seed), actor.optim

    def mini_batches(batch: BatchData, update: int) -> Sequence[Sequence[int]]:
        return list(schedule_rows(lengths_of(batch), schedule, update))

    def factor(step: int) -> float:
        return lr_factor(
            optim.lr_scheduler_type,
            step,
            warmup=optim.lr_warmup_steps,
            decay=optim.lr_decay_steps,
            least=optim.min_lr_ratio,
        )

    return MegatronPolicyBackend(
        path,
        lora=_adapters(config.lora) if config.lora.rank else None,
        loss=TrainerLoss(PolicyObjective(actor, config.algorithm.rollout_correction)),
        ranks=open_ranks(layout),
        fused=False,  # an A per module, as the other engines have it
        adam=AdamConfig(
            lr=optim.lr,
            beta1=optim.beta1,
            beta2=optim.beta2,
            weight_decay=optim.weight_decay,
            grad_clip=optim.grad_clip,
        ),
        schedule=factor,
        mini_batches=mini_batches,
        micro_batch_rows=actor.ppo_micro_batch_size,
        seed=config.trainer.seed,
        dtype=TORCH_DTYPES[config.megatron.param_dtype],
    )
