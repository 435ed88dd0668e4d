"""Keys of NeMo-RL and AReaL for asynchronous training, and arguments of TRL's `GRPOConfig`, which
a run does not accept, and what to set; and plain words for keys.

Those that mean the same are in `rl_app_ppo.config.verl_keys.aliases`, and verl's other keys in
`rl_app_ppo.config.verl_keys`.
"""

from __future__ import annotations

from collections.abc import Mapping

_WEIGHTS = "algorithm.rollout_correction.rollout_is"
_CAP = "here it is algorithm.rollout_correction.rollout_is_threshold"
_KEYS: Mapping[str, Mapping[str, str]] = {
    "NeMo-RL": {
        "grpo.async_grpo.enabled": "here it is async_rl.max_staleness, above 0",
        "grpo.async_grpo.max_generation_failures": "here it is replay.on_failure and replay.max_attempts",
        "grpo.async_grpo.recompute_kv_cache_after_weight_updates": "here the keys and values of a response that new weights continue "
        "are always computed again",
        "async_rl.sampler.max_lookahead_versions": "here it is async_rl.depth, which is at least 1 in an asynchronous run",
        "async_rl.max_buffered_rollouts": "here the size of the buffer follows from async_rl.depth",
        "loss_fn.use_importance_sampling_correction": f"here it is {_WEIGHTS}=token",
    },
    "AReaL": {
        "rollout.max_concurrent_rollouts": "here it is async_rl.max_inflight_prompts, in prompts",
        "actor.use_decoupled_loss": f"here it is algorithm.old_log_prob=recompute or interpolate with {_WEIGHTS}=token",
        "actor.behave_imp_weight_cap": _CAP,
        "actor.behav_imp_weight_cap": _CAP,
        "actor.recompute_logprob": "here it is algorithm.old_log_prob=recompute",
    },
    "TRL": {
        "num_generations": "here it is rollout.n",
        "max_completion_length": "here it is rollout.response_length",
        "temperature": "here it is rollout.temperature",
        "top_p": "here it is rollout.top_p",
        "top_k": "here it is rollout.top_k",
        "per_device_train_batch_size": "here it is data.train_batch_size, in prompts",
        "steps_per_generation": "here data.train_batch_size says how many prompts are generated at a time",
        "gradient_accumulation_steps": "here actor.ppo_mini_batch_size says how many prompts an update has, and "
        "actor.ppo_micro_batch_size how many responses a pass",
        "num_iterations": "here it is actor.ppo_epochs",
        "max_steps": "here it is trainer.total_training_steps, in batches of prompts",
        "num_train_epochs": "here it is trainer.total_epochs",
        "learning_rate": "here it is actor.optim.lr",
        "weight_decay": "here it is actor.optim.weight_decay",
        "max_grad_norm": "here it is actor.optim.grad_clip",
        "epsilon": "here it is actor.clip_ratio_low",
        "epsilon_high": "here it is actor.clip_ratio_high",
        "delta": "here it is actor.clip_ratio_c",
        "beta": "here it is actor.kl_loss_coef, with actor.use_kl_loss=true",
        "loss_type": "here it is actor.loss_agg_mode, or actor.policy_loss.loss_mode",
        "scale_rewards": "here it is algorithm.norm_adv_by_std_in_grpo",
        "importance_sampling_level": "here it is actor.policy_loss.loss_mode",
        "use_vllm": "here it is rollout.name=vllm",
        "vllm_importance_sampling_correction": f"here it is {_WEIGHTS}=token",
        "peft_config": "here it is lora.rank, lora.alpha and lora.target_modules",
        "report_to": "here it is trainer.logger",
    },
}
"""Trainer -> its key -> what to set here."""
WORDS: Mapping[str, str] = {
    "algo": "algorithm",
    "bf16": "rollout.dtype",
    "clip": "actor.clip_ratio_low",
    "checkpoint": "trainer.resume_mode",
    "data": "data.train_files",
    "dataset": "data.train_files",
    "epochs": "trainer.total_epochs",
    "eval_steps": "trainer.test_freq",
    "gpus": "trainer.n_gpus_per_node",
    "kl": "actor.use_kl_loss",
    "loss": "actor.policy_loss.loss_mode",
    "max_tokens": "rollout.response_length",
    "model_name": "model.path",
    "n_gpus": "trainer.n_gpus_per_node",
    "num_gpus": "trainer.n_gpus_per_node",
    "resume": "trainer.resume_mode",
    "rollout": "rollout.name",
    "save_steps": "trainer.save_freq",
    "seed": "trainer.seed",
    "steps": "trainer.total_training_steps",
    "threads": "trainer.threads_per_worker",
    "total_steps": "trainer.total_training_steps",
    "vllm": "rollout.name=vllm",
    "wandb": "trainer.logger=wandb",
    "workers": "rollout.num_workers",
}
"""Word that is no key -> the key, or the setting, that it most likely stands for."""


def describe_other(key: str) -> str:
    """The hint for a key of another trainer than verl; empty if none of them has it."""
    found = ((trainer, keys[key]) for trainer, keys in _KEYS.items() if key in keys)
    return next((f"It is a key of {trainer}; {here}." for trainer, here in found), "")
