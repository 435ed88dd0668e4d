"""Estimate the memory of the processes and the data plane of a run, and check that it fits."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import psutil

from rl_app_ppo.checks.role_memory import lasting_bytes
from rl_app_ppo.config.placement import Role, shares_weights, worker_groups
from rl_app_ppo.config.schema import AppConfig
from rl_app_ppo.inputs.weight_files import weight_shapes
from rl_protocol import ConfigError, SameLength
from rl_protocol.counted import counted
from rl_protocol.rl_columns import ROUTED
from rl_protocol.support.host.control_groups import memory_left
from rl_trainer import StepGraph
from rl_trainer.algorithms.staleness_policy import StalenessPolicy
from rl_trainer.config.adapter_folder import join_expert_shapes
from rl_trainer.config.lora import LoraConfig
from rl_trainer.data.model_families import RoutedLayers
from rl_trainer.workers.columns import REFERENCE_TOP, TRAINER_SCHEMA

_PROMPT_TOKEN = 8
"""Bytes of a prompt token in the data plane."""
_KEPT_WORDS = 64
"""Words of a set that top-p keeps, which a flat distribution exceeds."""
_EXPERT_ID = 2
"""Bytes of the number of an expert in the data plane."""
_HEADROOM = 1.1
"""Blocks do not span storage units, so the free space of several units is not contiguous."""


def parameters(model: Path) -> int:
    """Number of weights in a checkpoint folder, from the headers of its safetensors files.

    Raises:
        ConfigError: a header can't be read.
    """
    return sum(map(math.prod, weight_shapes(model).values()))


def trained_parameters(model: Path, lora: LoraConfig) -> int:
    """Number of weights that an actor trains: all, or those of its adapters.

    Raises:
        ConfigError: a header can't be read.
    """
    if not lora.rank:
        return parameters(model)
    shapes = join_expert_shapes(matrices(model))
    covered = (shape for name, shape in shapes.items() if lora.covers_weight(name))
    return sum(lora.rank * math.prod(shape[:-2]) * sum(shape[-2:]) for shape in covered)


def matrices(model: Path) -> dict[str, Sequence[int]]:
    """Shape of each weight with two dimensions in a checkpoint folder, by the name of its module.

    Raises:
        ConfigError: a header can't be read.
    """
    return {name.removesuffix(".weight"): shape for name, shape in weight_shapes(model).items() if len(shape) == 2}


def needed_bytes(
    weights: int, trained: int, config: AppConfig, reference: int | None = None
) -> dict[Role | Literal["weight sync"], int]:
    """Role -> bytes in all of its processes, without activations and caches.

    Args:
        weights: of the model.
        trained: those of them, or of its adapters, that an actor trains.
        config: the configuration of the run.
        reference: weights of the reference policy; None: as many as those of the policy.
    """
    needed: dict[Role | Literal["weight sync"], int] = {}
    groups = worker_groups(config)
    roles: list[Role] = [role for group in groups for rank in range(group.ranks) for role in group.roles_of(rank)]
    for role in roles:
        held = reference if role == "ref" and reference is not None else weights
        if size := sum(lasting_bytes(role, config, held, trained).values()):
            needed[role] = needed.get(role, 0) + size
    if config.checkpoint_engine.enabled and not config.sends_adapters and not shares_weights(config):
        needed["weight sync"] = 4 * weights
    return needed


def check_memory(
    weights: int,
    trained: int,
    config: AppConfig,
    available: int,
    on_gpu: Collection[Role] = (),
    reference: int | None = None,
) -> None:
    """Check that the models on the CPU fit into the memory of this machine.

    Args:
        weights: of the model.
        trained: those of them, or of its adapters, that an actor trains.
        config: the configuration of the run.
        available: bytes of memory for new processes.
        on_gpu: roles that compute on GPUs, whose models are not in this memory.
        reference: weights of the reference policy, as in `needed_bytes`.

    Raises:
        ConfigError: they do not; names the parts, their sum, and the available memory.
    """
    needed = {
        role: size for role, size in needed_bytes(weights, trained, config, reference).items() if role not in on_gpu
    }
    if sum(needed.values()) > available:
        parts = ", ".join(f"{role} {shown_bytes(size)}" for role, size in needed.items())
        raise ConfigError(
            f"A model of {weights:,} weights needs {shown_bytes(sum(needed.values()))} of memory before any activation ({parts}); "
            f"{shown_bytes(available)} are available. Set lora.rank, lower rollout.num_workers, or take a smaller model.path."
        )


def step_bytes(
    config: AppConfig,
    graph: StepGraph,
    longest: int,
    validation_rows: int,
    routed: RoutedLayers | None = None,
    sessions: int | None = None,
    image_bytes: int = 0,
) -> int:
    """Most bytes that must lie in the memory of the data plane for a step.

    A session counts as one trajectory: how many an agent of yours returns is not known before.
    Of the tokens that top-p keeps without top-k it counts _KEPT_WORDS for each token.
    Batches that were generated ahead (async_rl.depth) are there, too, and during validation. With a
    journal they leave memory while others need it: room for two batches is enough, one that is
    being read and as much for the pieces between its blocks.

    Args:
        config: the configuration of the run.
        graph: the stages of a step.
        longest: tokens of the longest prompt.
        validation_rows: rows of the validation set, which is rolled out as a whole.
        routed: layers of the model that have experts; None: it has none.
        sessions: most responses to a prompt that are trained on; None: rollout.n.
        image_bytes: most bytes of the images of a prompt, which its responses share.
    """
    rollout, batch = config.rollout, config.data.train_batch_size
    n = rollout.n if sessions is None else sessions
    words = rollout.top_k or _KEPT_WORDS
    widths = {stage.name: _token_bytes(stage.writes, config.actor.kl_loss_topk, words) for stage in graph.stages}
    filtering = config.algorithm.filter_groups
    rounds = filtering.max_num_gen_batches if filtering.enable else 1
    greedy = 1 if "baseline" in graph else 0
    responses = rounds * n + greedy  # of each prompt
    train = (
        batch
        * rollout.response_length
        * (responses * widths["rollout"] + n * (sum(widths.values()) - widths["rollout"]))
    )
    train += batch * rounds * (longest * _PROMPT_TOKEN + image_bytes)
    if routed is not None and any(ROUTED in stage.writes for stage in graph.stages):
        rows = batch * n * (rounds if ROUTED in graph["rollout"].writes else 1)
        train += rows * (longest + rollout.response_length) * routed.layers * routed.top_k * _EXPERT_ID
    validated = (
        rollout.val_kwargs.n * rollout.response_length * widths["rollout"] + longest * _PROMPT_TOKEN + image_bytes
    )
    ahead = StalenessPolicy.of(config.async_rl, batch).capacity // batch
    batches = ahead if config.transfer_queue.durability == "off" else min(ahead, 2)
    return train * batches + validation_rows * validated if batches > 1 else max(train, validation_rows * validated)


def _token_bytes(columns: Sequence[str], top: int, words: int) -> int:
    """Bytes of one response token in the columns that have a value, `top` values, or `words` of a
    kept set, per token.
    """
    per_token = {name for law in TRAINER_SCHEMA.laws if isinstance(law, SameLength) for name in law.columns}
    values = dict.fromkeys(per_token, 1) | dict.fromkeys(REFERENCE_TOP, top) | {"kept_words": words}
    return sum(values[name] * np.dtype(TRAINER_SCHEMA[name].dtype).itemsize for name in columns if name in values)


def check_plane_size(config: AppConfig, needed: int) -> None:
    """Check that the data plane can hold a step.

    Args:
        config: the configuration of the run.
        needed: most bytes of a step, from `step_bytes`.

    Raises:
        ConfigError: it can't; names the key and the least value.
    """
    least, got = math.ceil(needed * _HEADROOM / 2**20), config.transfer_queue.capacity_mb
    if least > got:
        rollout, ahead = config.rollout, config.async_rl.steps_ahead
        ahead = ahead if config.transfer_queue.durability == "off" else min(ahead, 1)
        early = f", and {counted(ahead, 'step')} ahead (async_rl.depth)" if ahead else ""
        raise ConfigError(
            f"transfer_queue.capacity_mb={got} is too small: with data.train_batch_size={config.data.train_batch_size}, rollout.n={rollout.n} "
            f"and rollout.response_length={rollout.response_length}{early}, a step or a validation can take {least} MiB of the data plane. Set "
            f"transfer_queue.capacity_mb={least} (memory is allocated on use), or lower one of the others."
        )


def available_bytes() -> int:
    """Memory available to new processes on this host and in this container, bytes."""
    free, left = psutil.virtual_memory().available, memory_left()
    return free if left is None else min(free, left)


def shown_bytes(size: int) -> str:
    """A number of bytes for people."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
