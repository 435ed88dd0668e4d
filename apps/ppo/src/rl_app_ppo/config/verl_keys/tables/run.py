"""The loop, its outputs, and the processes."""

from __future__ import annotations

from collections.abc import Iterator

from rl_app_ppo.config.verl_keys import conversions
from rl_app_ppo.config.verl_keys.aliases import BOUND, ON_UPDATE, our_value
from rl_app_ppo.config.verl_keys.key_entries import Entry, checked, converted, no_effect, unsupported

_PARTIAL = "async_training.partial_rollout"
_SAMPLES = "samples/ of the run folder holds what was generated"
_LOCAL = "a run and its checkpoints are kept in its folder, trainer.output_dir/trainer.run_name"
_RAY = "ray.address and ray.start_timeout_s say how processes start"
_PROFILE = "trainer.profile_steps profiles every process that has a model"


def _skips() -> Iterator[Entry]:
    for name in ("rollout", "rollout_tq", "async_rollout"):
        yield unsupported("responses are generated in every step", f"skip.{name}.enable")
        yield unsupported("responses are generated in every step", f"skip.{name}.*", needs=f"skip.{name}.enable")


ENTRIES: tuple[Entry, ...] = (
    converted("trainer.total_training_steps", "trainer.total_training_steps", conversions.total_steps, null=True),
    converted("trainer.test_freq", "trainer.test_freq", conversions.at_least_0("trainer.test_freq")),
    converted("trainer.save_freq", "trainer.save_freq", conversions.at_least_0("trainer.save_freq")),
    converted("trainer.max_actor_ckpt_to_keep", "trainer.max_ckpt_to_keep", conversions.keep, null=True),
    converted("trainer.max_critic_ckpt_to_keep", "trainer.max_ckpt_to_keep", conversions.keep, null=True),
    converted("trainer.critic_warmup", "critic.warmup_steps", conversions.critic_warmup),
    converted("trainer.resume_mode", "trainer.resume_mode", conversions.resume),
    no_effect("verl reads it with trainer.resume_mode=resume_path alone", "trainer.resume_from_path"),
    converted("trainer.default_local_dir", "trainer.output_dir", conversions.output_dir),
    converted("trainer.experiment_name", "trainer.run_name", conversions.run_name),
    converted("trainer.logger", "trainer.logger", conversions.loggers),
    no_effect("the environment variable WANDB_PROJECT names the project", "trainer.project_name"),
    checked(
        "trainer.n_gpus_per_node",
        conversions.gpus,
        "fsdp.world_size or megatron.world_size is the number of processes that share each model",
    ),
    no_effect("fsdp.device says where models are", "trainer.device"),
    no_effect(_SAMPLES, "trainer.log_val_generations trainer.rollout_data_dir trainer.validation_data_dir"),
    no_effect(_LOCAL, "trainer.default_hdfs_dir trainer.del_local_ckpt_after_load trainer.esi_redundant_time"),
    no_effect("trainer.hooks names hooks that installed packages offer", "trainer.checkpoint_callback_class"),
    no_effect(_RAY, "trainer.ray_wait_register_center_timeout ray_kwargs.*"),
    no_effect("responses are always dealt so that ranks are alike in tokens", "trainer.balance_batch"),
    unsupported("set trainer.total_training_steps=0", "trainer.val_only"),
    no_effect("there is one trainer", "trainer.use_v1"),
    converted(
        "trainer.v1.trainer_mode",
        f"{BOUND} async_rl.depth {ON_UPDATE} async_rl.order async_rl.when_stale",
        conversions.trainer_mode,
    ),
    no_effect(
        "trainer.v1.trainer_mode=separate_async sets async_rl.max_staleness, async_rl.depth and async_rl.when_stale",
        "separate_async.num_warmup_batches sampler.max_off_policy_threshold sampler.max_off_policy_strategy",
        prefix="trainer.v1.",
    ),
    no_effect("the weights are sent after every step", "trainer.v1.separate_async.parameter_sync_step"),
    no_effect("the trainer's processes never generate", "trainer.v1.separate_async.hybrid_rollout.*"),
    unsupported("set data.curriculum", "trainer.v1.sampler.custom_sampler.path"),
    unsupported("a prompt whose sessions all fail is left out", "trainer.v1.sampler.sync_refill_failed_groups"),
    no_effect("verl reads it in asynchronous modes alone", "trainer.v1.*"),
    converted(_PARTIAL, ON_UPDATE, lambda value, _: {ON_UPDATE: our_value(_PARTIAL, value)}),
    unsupported(
        "it is a share of the samples of a step; set async_rl.max_staleness, in versions of the weights",
        "async_training.staleness_threshold",
    ),
    unsupported(
        "the weights are sent after every step, which trains data.train_batch_size prompts",
        "async_training.trigger_parameter_sync_step async_training.require_batches",
    ),
    no_effect("the rollout workers validate, beside training", "async_training.use_trainer_do_validate"),
    no_effect(_PROFILE, "global_profiler.*"),
    *_skips(),
)
