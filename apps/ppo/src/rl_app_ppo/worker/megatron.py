"""Policy and critic on Megatron-Core with the losses of rl-trainer. Imports torch and Megatron."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

import rl_trainer
from rl_app_ppo.config.placement import Role
from rl_app_ppo.config.schema import AppConfig
from rl_app_ppo.worker.build import Build, Built, join_timeout_s, sender_of, sends_weights
from rl_app_ppo.worker.messages import BuildCall
from rl_app_ppo.worker.update_meter import meter_of
from rl_megatron_peft import Layout, LoraConfig
from rl_megatron_peft.backend.critic import MegatronCriticBackend
from rl_megatron_peft.backend.parallel import Ranks, all_reduce_data_parallel, open_ranks
from rl_megatron_peft.backend.policy import MegatronPolicyBackend
from rl_megatron_peft.backend.train.mini_batches import MetricSums, MiniBatchCounts
from rl_megatron_peft.backend.train.settings import TrainSettings
from rl_protocol import BatchData, RLError
from rl_protocol.ports import DataPlane, RolloutEngine
from rl_protocol.support.rendezvous import Rendezvous
from rl_protocol.torch import TORCH_DTYPES
from rl_trainer import ActorWorker, CriticWorker, MegatronConfig, ReferenceWorker, StepColumns
from rl_trainer.algorithms.batching import schedule_rows
from rl_trainer.algorithms.losses.aggregate import BatchCounts
from rl_trainer.algorithms.losses.policy_objective import PolicyObjective
from rl_trainer.algorithms.losses.value_loss import ValueObjective, value_fit
from rl_trainer.algorithms.metrics import WeightedMeans
from rl_trainer.algorithms.old_log_prob import loss_correction
from rl_trainer.backends.token_batch import lengths_of, token_columns, value_columns
from rl_trainer.backends.world import device_of, join_world
from rl_trainer.config.optim import Schedule
from rl_trainer.workers.model import UpdateMeter


class TrainerLoss:
    """PolicyLoss of the Megatron backend over the trainer's objective."""

    def __init__(self, objective: PolicyObjective) -> None:
        self._objective = objective

    def __call__(
        self, log_prob: torch.Tensor, entropy: torch.Tensor, micro: BatchData, counts: MiniBatchCounts
    ) -> tuple[torch.Tensor, MetricSums]:
        means = WeightedMeans()
        columns = token_columns(micro, _row(micro, log_prob.device))
        return self._objective(log_prob, entropy, columns, _sizes(counts), means), means.parts()


class TrainerValueLoss:
    """ValueLoss of the Megatron backend over the trainer's objective."""

    def __init__(self, objective: ValueObjective) -> None:
        self._objective = objective

    def __call__(
        self, values: torch.Tensor, micro: BatchData, counts: MiniBatchCounts
    ) -> tuple[torch.Tensor, MetricSums]:
        means = WeightedMeans()
        columns = value_columns(micro, _row(micro, values.device))
        return self._objective(values, columns, _sizes(counts), means), means.parts()


class TrainerCritic(MegatronCriticBackend):
    """MegatronCriticBackend with the value-fit metric of the whole batch."""

    def update_local(self, batch: BatchData, mini_batches: Sequence[Sequence[int]]) -> dict[str, float]:
        return super().update_local(batch, mini_batches) | value_fit(batch, mini_batches, self._total)

    def _total(self, values: Sequence[float]) -> list[float]:
        numbers = torch.tensor(values, dtype=torch.float64, device=self.ranks.device)
        return all_reduce_data_parallel(numbers).tolist()


def _adapters(lora: rl_trainer.LoraConfig) -> LoraConfig:
    return LoraConfig(
        rank=lora.rank,
        alpha=lora.alpha,
        target_modules=lora.targets(),
        exclude=lora.exclude,
        dropout=lora.dropout,
        use_dora=lora.use_dora,
        use_rslora=lora.use_rslora,
    )


def build_megatron(
    config: AppConfig, call: BuildCall, plane: DataPlane, columns: StepColumns, meeting: Rendezvous
) -> Build:
    """Builder of model_engine=megatron: tensor, pipeline and data parallel ranks."""
    path, ranks = Path(call.model_path), join_ranks(config, meeting)
    sharing = ranks.layout.tensor * ranks.layout.pipeline

    def meter(role: Role) -> UpdateMeter | None:
        return meter_of(role, config, path, ranks.device, sharing=sharing)

    def build(role: Role, _: RolloutEngine | None) -> Built:
        if role == "critic":
            critic = megatron_critic(config, path, ranks)
            if call.critic_adapter_path:
                with _loading("critic.adapter_path"):
                    critic.load_adapter(Path(call.critic_adapter_path))
            return CriticWorker(plane, columns, critic, meter(role)), None
        temperature = config.rollout.temperature
        if role == "ref":
            reference = megatron_policy(config, Path(call.reference_path or path), ranks, frozen=True)
            return ReferenceWorker(plane, columns, reference, temperature), None
        policy = megatron_policy(config, path, ranks, sends=sends_weights(config, call))
        if call.adapter_path:
            with _loading("lora.adapter_path"):
                policy.load_adapter(Path(call.adapter_path))
        itself = config.algorithm.teacher_is_policy
        worker = ActorWorker(plane, columns, policy, temperature, teacher_is_policy=itself, meter=meter(role))
        return worker, sender_of(config, call, policy)

    return build


@contextmanager
def _loading(key: str) -> Generator[None]:
    """Begin the errors of a block, which name a file, with the key of the adapter's path."""
    try:
        yield
    except RLError as error:
        error.message = f"{key}: {error.message}"
        raise


def megatron_policy(
    config: AppConfig, path: Path, ranks: Ranks, *, frozen: bool = False, sends: bool = True
) -> MegatronPolicyBackend:
    """Create this rank's part of the policy; models in one process get the same `ranks`.

    A frozen one is a reference without an optimizer. `sends`: see TrainSettings.

    Raises:
        ConfigError: Megatron-Core does not support the model or layout; names the setting.
    """
    actor, options = config.actor, config.engine_as(MegatronConfig)
    return MegatronPolicyBackend(
        path,
        lora=_adapters(config.lora) if config.lora.rank and not frozen else None,
        loss=TrainerLoss(PolicyObjective(actor, loss_correction(config.algorithm))),
        ranks=ranks,
        settings=TrainSettings(
            fused=False,  # one A per module, as in the other engines
            adam=actor.optim,
            lr_schedule=actor.optim.lr_factor,
            mini_batches=_mini_batches(actor.schedule(config.rollout.n, config.trainer.seed)),
            micro_batch_rows=actor.ppo_micro_batch_size,
            micro_batch_tokens=actor.pass_tokens,
            seed=config.trainer.seed,
            dtype=TORCH_DTYPES[options.param_dtype],
            distributed_optimizer=options.distributed_optimizer,
            merge_on_save=config.lora.merge_on_save,
            records_experts=config.algorithm.router_replay == "R2" and not frozen,
            sends=sends,
        ),
        frozen=frozen,
    )


def megatron_critic(config: AppConfig, path: Path, ranks: Ranks) -> TrainerCritic:
    """Create this rank's part of the critic; see `megatron_policy`."""
    critic, options = config.critic, config.engine_as(MegatronConfig)
    return TrainerCritic(
        path,
        lora=_adapters(config.lora) if critic.use_lora else None,
        loss=TrainerValueLoss(ValueObjective(critic)),
        ranks=ranks,
        settings=TrainSettings(
            fused=False,
            adam=critic.optim,
            lr_schedule=critic.optim.lr_factor,
            mini_batches=_mini_batches(critic.schedule(config.rollout.n, config.trainer.seed)),
            micro_batch_rows=critic.ppo_micro_batch_size,
            micro_batch_tokens=critic.pass_tokens,
            seed=config.trainer.seed,
            dtype=TORCH_DTYPES[options.param_dtype],
            distributed_optimizer=options.distributed_optimizer,
        ),
    )


def join_ranks(config: AppConfig, meeting: Rendezvous) -> Ranks:
    """Join the other ranks, once in a process.

    Raises:
        ConfigError: the number of ranks does not fit the layout.
        WorkerError: a rank did not join in time.
    """
    join_world(
        meeting,
        device=device_of("auto"),
        timeout_s=config.trainer.stage_timeout_s,
        join_timeout_s=join_timeout_s(config),
    )
    megatron = config.engine_as(MegatronConfig)
    return open_ranks(
        Layout(
            tensor=megatron.tensor_model_parallel_size,
            pipeline=megatron.pipeline_model_parallel_size,
            sequence_parallel=megatron.sequence_parallel,
            expert=megatron.expert_model_parallel_size,
        )
    )


def _mini_batches(schedule: Schedule) -> Callable[[BatchData, int], Sequence[Sequence[int]]]:
    def mini_batches(batch: BatchData, update: int) -> Sequence[Sequence[int]]:
        return list(schedule_rows(lengths_of(batch), schedule, update))

    return mini_batches


def _row(micro: BatchData, device: torch.device) -> torch.Tensor:
    """Trajectory of each response token, int64 [T]."""
    lengths = torch.from_numpy(micro.ragged("responses").lengths).to(device)
    return torch.arange(len(micro), device=device).repeat_interleave(lengths)


def _sizes(counts: MiniBatchCounts) -> BatchCounts:
    return BatchCounts(tokens=counts.tokens, sequences=counts.sequences)
