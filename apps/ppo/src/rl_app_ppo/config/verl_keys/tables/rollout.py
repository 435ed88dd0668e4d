"""Generation, weight synchronization and the data plane."""

from __future__ import annotations

from collections.abc import Iterator

from rl_app_ppo.config.verl_keys import conversions
from rl_app_ppo.config.verl_keys.conversions import ROLLOUT, TOOLS
from rl_app_ppo.config.verl_keys.key_entries import Entry, converted, no_effect, only, unsupported
from rl_trainer.config.agent import DIALECT_NAMES

_ENGINE = "the rollout engine's own settings are not passed on"
_LAYOUT = "rollout.num_workers replicas of rollout.tensor_model_parallel_size processes generate"
_SESSION = "set rollout.session to a session that an installed package offers"
_TOP_K = "rollout.top_k rollout.sampling_replay"
_VERL_DIALECTS = {"gpt-oss": "openai", "kimi": "kimi_k2", "glm": "glm45"}
"""verl's names of dialects -> ours."""
_QUEUE = "the data plane is always used, on this host"


def _multi_turn(group: str) -> Iterator[Entry]:
    on = f"{group}.enable"
    yield converted(on, "rollout.session", lambda value, _: {"rollout.session": "tool_agent"} if value else {})
    yield converted(
        f"{group}.format",
        "rollout.agent.dialect",
        conversions.one_of("rollout.agent.dialect", {name: name for name in DIALECT_NAMES} | _VERL_DIALECTS),
        needs=on,
    )
    yield converted(
        f"{group}.max_assistant_turns", "rollout.agent.turns", lambda value, _: {"rollout.agent.turns": value}, needs=on
    )
    yield converted(
        f"{group}.max_tool_response_length",
        "rollout.agent.answer_chars",
        lambda value, _: {"rollout.agent.answer_chars": value},
        needs=on,
    )
    yield unsupported(
        "the end of a long answer is cut off, as with left", f"{group}.tool_response_truncate_side", needs=on
    )
    yield unsupported("all calls of a turn are made", f"{group}.max_parallel_calls", needs=on)
    yield unsupported("rollout.agent.turns limits the turns of the policy", f"{group}.max_user_turns", needs=on)
    yield unsupported(TOOLS, f"{group}.tool_config_path {group}.function_tool_path", needs=on)
    yield no_effect(
        "the tokens of a turn are kept, and never encoded again",
        "use_inference_chat_template tokenization_sanity_check_mode",
        prefix=f"{group}.",
    )
    yield unsupported("rollout.n sessions start from each prompt", f"{group}.num_repeat_rollouts", needs=on)


ENTRIES: tuple[Entry, ...] = (
    converted(f"{ROLLOUT}.name", "rollout.name", conversions.rollout_name),
    converted(f"{ROLLOUT}.top_k", _TOP_K, conversions.kept_tokens("rollout.top_k")),
    converted(f"{ROLLOUT}.dtype", "rollout.dtype", conversions.one_of("rollout.dtype", conversions.DTYPES)),
    converted(f"{ROLLOUT}.free_cache_engine", "rollout.free_cache_engine", conversions.free_cache_engine),
    only(f"{ROLLOUT}.do_sample", True, why="greedy samples teach nothing; rollout.temperature is above 0"),
    converted(f"{ROLLOUT}.val_kwargs.temperature", "rollout.val_kwargs.temperature", conversions.val_temperature),
    converted(f"{ROLLOUT}.val_kwargs.do_sample", "rollout.val_kwargs.temperature", lambda _v, _verl: {}),
    no_effect(
        "validation samples from all tokens, and concerns no training", "top_k top_p", prefix=f"{ROLLOUT}.val_kwargs."
    ),
    no_effect("prompts are as long as data.max_prompt_length lets them be", f"{ROLLOUT}.prompt_length"),
    converted(
        f"{ROLLOUT}.gpu_memory_utilization",
        "rollout.gpu_memory_utilization",
        conversions.of_vllm("rollout.gpu_memory_utilization", 0.5),
    ),
    converted(f"{ROLLOUT}.max_model_len", "rollout.max_model_len", conversions.of_vllm("rollout.max_model_len")),
    converted(f"{ROLLOUT}.enforce_eager", "rollout.enforce_eager", conversions.of_vllm("rollout.enforce_eager", False)),
    no_effect("set rollout.max_batch_size", f"{ROLLOUT}.max_num_seqs"),
    no_effect("set rollout.num_workers, the number of replicas", f"{ROLLOUT}.agent.num_workers"),
    no_effect(
        _LAYOUT,
        "nnodes n_gpus_per_node data_parallel_size expert_parallel_size pipeline_model_parallel_size disaggregation.* router_config_path",
        prefix=f"{ROLLOUT}.",
    ),
    no_effect(
        "actor.ppo_micro_batch_size and actor.ppo_max_token_len cut the forward passes of old log-probs as well",
        "log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu log_prob_use_dynamic_bsz log_prob_max_token_len_per_gpu",
        prefix=f"{ROLLOUT}.",
    ),
    no_effect(
        _ENGINE,
        """mode cudagraph_capture_sizes max_num_batched_tokens enable_chunked_prefill
        enable_prefix_caching scheduling_policy load_format layered_summon disable_log_stats multi_stage_wake_up engine_kwargs.*
        skip_tokenizer_init limit_images logprobs_mode""",
        prefix=f"{ROLLOUT}.",
    ),
    no_effect("names of layers follow from the model", f"{ROLLOUT}.layer_name_map.*"),
    no_effect("everything random is drawn from trainer.seed", f"{ROLLOUT}.seed {ROLLOUT}.full_determinism"),
    no_effect("log-probs of the rollout are always kept", f"{ROLLOUT}.calculate_log_probs"),
    no_effect("samples/ of the run folder holds what was generated", f"{ROLLOUT}.trace.*"),
    no_effect(
        "metrics go where trainer.logger says", f"{ROLLOUT}.prometheus.* {ROLLOUT}.moe_load_balance_metrics_interval"
    ),
    no_effect("trainer.profile_steps profiles every process that has a model", f"{ROLLOUT}.profiler.*"),
    unsupported("the rollout is not quantized", f"{ROLLOUT}.quantization {ROLLOUT}.quantization_config_file"),
    unsupported("the rollout is not quantized", f"{ROLLOUT}.qat.*", needs=f"{ROLLOUT}.qat.enable"),
    unsupported("there is no multi-token prediction", f"{ROLLOUT}.mtp.*", needs=f"{ROLLOUT}.mtp.enable"),
    no_effect(
        "algorithm.router_replay=R3 makes the rollout report the experts", f"{ROLLOUT}.enable_rollout_routing_replay"
    ),
    only(f"{ROLLOUT}.over_sample_rate", 0, why="as many responses are generated as are trained on"),
    *_multi_turn(f"{ROLLOUT}.multi_turn"),
    converted(f"{ROLLOUT}.agent.default_agent_loop", "rollout.session", conversions.agent_loop),
    unsupported(_SESSION, "agent_loop_config_path custom_async_server.*", prefix=f"{ROLLOUT}.agent."),
    # -- weight synchronization
    converted(f"{ROLLOUT}.checkpoint_engine.backend", "checkpoint_engine.backend", conversions.sync_backend),
    converted(
        f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes",
        "checkpoint_engine.bucket_mb",
        conversions.unless(2048, "checkpoint_engine.bucket_mb"),
    ),
    converted(
        f"{ROLLOUT}.checkpoint_engine.custom_backend_module",
        "checkpoint_engine.custom_backend_module",
        conversions.plugin("checkpoint_engine.custom_backend_module"),
    ),
    converted(
        f"{ROLLOUT}.checkpoint_manager_class",
        "checkpoint_engine.checkpoint_manager_class",
        conversions.plugin("checkpoint_engine.checkpoint_manager_class"),
    ),
    no_effect("an engine has the settings of checkpoint_engine alone", f"{ROLLOUT}.checkpoint_engine.engine_kwargs.*"),
    # -- data plane
    no_effect(_QUEUE, "transfer_queue.enable"),
    converted("transfer_queue.backend.storage_backend", "transfer_queue.backend", conversions.storage),
    converted(
        "transfer_queue.backend.SimpleStorage.num_data_storage_units",
        "transfer_queue.num_storage_units",
        conversions.unless(8, "transfer_queue.num_storage_units"),
    ),
    no_effect(
        "set transfer_queue.capacity_mb: memory, not rows", "transfer_queue.backend.SimpleStorage.total_storage_size"
    ),
    no_effect("set transfer_queue.backend_address", "transfer_queue.backend.MooncakeStore.*"),
    no_effect("metrics go where trainer.logger says", "transfer_queue.metrics.*"),
)
