"""The banner: a description of the run, from its configuration and this machine."""

from __future__ import annotations

from pathlib import Path

from rl_app_ppo.checks.machine import gpu_count
from rl_app_ppo.config.full_keys import with_full_keys
from rl_app_ppo.config.placement import worker_groups
from rl_app_ppo.config.presets import NO_PRESET, presets
from rl_app_ppo.config.schema import AppConfig
from rl_app_ppo.demo.demos import DEMOS
from rl_protocol.counted import counted
from rl_trainer import AlgorithmConfig, OptimConfig, needs_critic, needs_reference
from rl_trainer.algorithms.old_log_prob import recompute_reason

_DRIVER = Path("/proc/driver/nvidia")
"""Exists if NVIDIA's driver is installed; without it there is no GPU, and torch is not imported."""


def described(config: AppConfig) -> dict[str, str]:
    """Title -> text of each line."""
    rollout, data = config.rollout, config.data
    return {
        "algorithm": f"{config.algorithm.name}, {_losses(config)}, seed {config.trainer.seed}",
        "preset": "; ".join(map(_preset, config.preset)),
        "model": config.model.path or "demo model",
        "trained": _trained(config),
        "actor": f"{_optimizer(config.actor.optim)}, mini-batches of {counted(config.actor.ppo_mini_batch_size, 'prompt')}, "
        f"clip {config.actor.clip_ratio_low:g} / {config.actor.clip_ratio_high:g}",
        **({"critic": _optimizer(config.critic.optim)} if needs_critic(config.algorithm) else {}),
        **({"old log-probs": _old_log_probs(config.algorithm)} if config.algorithm.trains_policy else {}),
        "task": _task(config),
        "reward": config.reward.function,
        "rollout": f"{rollout.name} in {rollout.dtype}, {rollout.session}, at most {counted(rollout.response_length, 'token')} per response, "
        f"temperature {rollout.temperature:g}",
        "step": f"{counted(data.train_batch_size, 'prompt')} {_responses(config)}, {_length(config)}",
        "workers": f"{_workers(config)}; {_placed(config)}; Ray ({config.ray.address})",
        "data plane": f"rl-transferqueue, {counted(config.transfer_queue.num_storage_units, 'storage unit')}, "
        + {"simple": "shared memory"}.get(config.transfer_queue.backend, config.transfer_queue.backend),
        "weights": f"rl-ckpt-engine ({config.checkpoint_engine.backend}), after every step"
        if config.checkpoint_engine.enabled
        else "SYNC IS OFF: rollout keeps the initial weights",
    }


def _responses(config: AppConfig) -> str:
    """How many responses a step has."""
    n, prompts = config.rollout.n, config.data.train_batch_size
    if config.algorithm.fewest_sessions(n, divergence=config.actor.use_kl_loss) < n:
        return f"x {n} responses, or 1 where the answer alone is trained on"
    return f"x {counted(n, 'response')} = {prompts * n}"


def _losses(config: AppConfig) -> str:
    """The parts of the loss."""
    algorithm, parts = config.algorithm, list[str]()
    if algorithm.rl_coef:
        weight = "" if algorithm.rl_coef == 1 else f"{algorithm.rl_coef:g} x "
        parts.append(f"advantages {algorithm.adv_estimator}, {weight}loss {config.actor.policy_loss.loss_mode}")
    if algorithm.sft_coef:
        parts.append(f"{algorithm.sft_coef:g} x cross-entropy of the data's answers ({config.data.answer_key})")
    if algorithm.echo_coef:
        parts.append(f"{algorithm.echo_coef:g} x cross-entropy of observations")
    if algorithm.by_source:
        parts.append(f"by source {', '.join(algorithm.by_source)}")
    return " + ".join(parts)


def _preset(name: str) -> str:
    return "none: the defaults of the algorithm" if name == NO_PRESET else f"{name}: {presets().get(name, 'your file')}"


def _trained(config: AppConfig) -> str:
    lora = config.lora
    what = (
        f"LoRA of rank {lora.rank}, alpha {lora.alpha:g}, on {', '.join(lora.target_modules)}"
        if lora.rank
        else "all weights"
    )
    return f"{what}, by {config.model_engine} on {_device(config)} in {config.engine.computes_in}"


def _device(config: AppConfig) -> str:
    """Device of the trained models."""
    asked = config.engine.trains_on if config.trainer.n_gpus_per_node else "cpu"
    if asked != "auto":
        return asked
    if config.ray.address != "local":
        return "cuda where there is a GPU, otherwise cpu"
    return "cuda" if _DRIVER.exists() and gpu_count() else "cpu"


def _old_log_probs(algorithm: AlgorithmConfig) -> str:
    reason = with_full_keys(recompute_reason(algorithm))
    return {
        "recompute": "recomputed in every step",
        "rollout": "those of the rollout engine",
        "interpolate": "between those of the rollout engine and of the trained policy, by the age of the token's weights",
        "auto": f"recomputed in every step, since {reason}"
        if reason
        else f"those of the rollout engine where they agree within {algorithm.old_log_prob_tolerance:g} nats, else recomputed",
    }[algorithm.old_log_prob]


def _optimizer(optim: OptimConfig) -> str:
    warm_up = f", warm-up of {counted(optim.lr_warmup_steps, 'update')}" if optim.lr_warmup_steps else ""
    fall = f", {optim.lr_scheduler_type} until update {optim.lr_decay_steps}" if optim.lr_decay_steps else ""
    return f"lr {optim.lr:g}{warm_up}{fall}"


def _workers(config: AppConfig) -> str:
    """The processes of each role."""
    ranks = f" x {config.ranks}" if config.ranks > 1 else ""
    parts = [f"{config.rollout.num_workers} rollout", "reward", f"actor{ranks}"]
    if needs_reference(config.algorithm, config.actor):
        parts.append(f"reference{ranks}" if config.loads_reference else "reference (the actor without its adapter)")
    if needs_critic(config.algorithm):
        parts.append(f"critic{ranks}")
    return ", ".join(parts)


def _placed(config: AppConfig) -> str:
    """The placement, and the roles that share a process."""
    shared = ["+".join(group.roles) for group in worker_groups(config) if len(group.roles) > 1]
    together = f" (in one process: {', '.join(shared)})" if shared else ""
    return f"placement {','.join(config.placement)}{together}"


def _length(config: AppConfig) -> str:
    epochs, steps = config.trainer.total_epochs, counted(config.trainer.total_training_steps, "step")
    return f"{steps} (at most {counted(epochs, 'epoch')})" if epochs else steps


def _task(config: AppConfig) -> str:
    data = config.data
    if data.train_files:
        held_out = "with held-out rows" if config.holds_out else "with nothing"
        validated = f"validated {'with ' + ', '.join(data.val_files) if data.val_files else held_out}"
        return f"{', '.join(data.train_files)}, {validated}, prompts of at most {data.max_prompt_length} tokens"
    return f"{DEMOS[data.demo].title}, {data.train_size} training and {data.val_size} validation problems"
