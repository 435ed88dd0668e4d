"""Actor, reference, critic and their engines."""

from __future__ import annotations

from collections.abc import Iterator

from rl_app_ppo.config.verl_keys import conversions
from rl_app_ppo.config.verl_keys.conversions import ACTOR, MODEL
from rl_app_ppo.config.verl_keys.key_entries import Entry, checked, converted, no_effect, only, same, unsupported
from rl_trainer.algorithms.losses import POLICY_LOSSES

REF = "actor_rollout_ref.ref"
_MEMORY = "it concerns memory and speed alone"
_ONE_ENGINE = "the engine of the actor, and its settings, are those of all models"
_LAYOUT = "models are cut by megatron.tensor_, pipeline_ and expert_model_parallel_size alone"
_CHECKPOINT = "a checkpoint holds everything that a run needs to resume"
_PROFILE = "trainer.profile_steps profiles every process that has a model"
_DETERMINISM = "everything random is drawn from trainer.seed"
_OFFLOAD = "fsdp.cpu_offload=true keeps weights and optimizer state in host memory"
_VISION = "no part of a model is frozen"
_MUON = "AdamW is the optimizer"
_HALF = "cosine falls once, over half a period"


def _optimizer(role: str) -> Iterator[Entry]:
    optim, ours = f"{conversions.PREFIX[role]}.optim", f"{role}.optim"
    yield converted(
        f"{optim}.betas", f"{ours}.beta1 {ours}.beta2", lambda v, _: {f"{ours}.beta1": v[0], f"{ours}.beta2": v[1]}
    )
    for name in ("optimizer", "name"):
        yield only(f"{optim}.{name}", "AdamW", "adamw", "adam", "Adam", why=_MUON)
    yield only(f"{optim}.optimizer_impl", "torch.optim", why="the optimizer is torch's AdamW")
    for name in ("lr_scheduler_type", "lr_decay_style", "warmup_style"):
        yield converted(f"{optim}.{name}", f"{ours}.lr_scheduler_type {ours}.lr_decay_steps", conversions.decay(role))
    yield converted(f"{optim}.lr_warmup_steps", f"{ours}.lr_warmup_steps", conversions.warmup(role))
    yield converted(f"{optim}.lr_warmup_steps_ratio", f"{ours}.lr_warmup_steps", conversions.warmup_ratio(role))
    yield converted(f"{optim}.min_lr_ratio", f"{ours}.min_lr_ratio", conversions.least_ratio(role))
    yield converted(f"{optim}.min_lr", f"{ours}.min_lr_ratio", conversions.least(role))
    yield checked(f"{optim}.num_cycles", conversions.decay_only(role, 0.5, why=_HALF), _HALF)
    yield only(f"{optim}.lr_warmup_init", 0, why="the warm-up starts from 0")
    yield only(f"{optim}.weight_decay_incr_style", "constant", why="weight decay is constant")
    yield no_effect(
        "verl replaces it by the length of the run: trainer.total_training_steps or trainer.total_epochs",
        "total_training_steps",
        prefix=f"{optim}.",
    )
    yield no_effect(
        f"it is read with the other schedules: {ours}.lr_decay_steps is set from it",
        "lr_decay_steps",
        prefix=f"{optim}.",
    )
    yield no_effect("it moves the schedule by one step", "zero_indexed_step", prefix=f"{optim}.")
    yield no_effect(
        "the optimizer's state and the sums of gradients are float32",
        "use_precision_aware_optimizer main_grads_dtype exp_avg_dtype exp_avg_sq_dtype",
        prefix=f"{optim}.",
    )
    yield no_effect(_MEMORY, "use_layer_wise_distributed_optimizer", prefix=f"{optim}.")
    yield no_effect(_CHECKPOINT, "use_checkpoint_opt_param_scheduler", prefix=f"{optim}.")
    yield no_effect(
        "verl reads it with the schedule WSD alone", "lr_wsd_decay_style lr_wsd_decay_steps", prefix=f"{optim}."
    )
    muon = """muon_momentum muon_nesterov muon_split_qkv muon_scale_mode muon_coefficient_type muon_num_ns_steps muon_tp_mode
        muon_fp32_matmul_prec muon_extra_scale_factor muon_scalar_optimizer muon_match_adamw_update_rms"""
    yield no_effect("verl reads it with the optimizer muon alone", muon, prefix=f"{optim}.")
    yield no_effect(
        "the optimizer's state is float32, and lies where the model does",
        "optimizer_cpu_offload optimizer_offload_fraction overlap_cpu_optimizer_d2h_h2d use_precision_aware_optimizer",
        prefix=f"{optim}.override_optimizer_config.",
    )
    yield unsupported("AdamW has no such setting here", f"{optim}.override_optimizer_config.*")
    yield no_effect(
        "verl reads it with an engine that is not supported",
        "decay_type eps min_lr_factor lr_decay_ratio lr_min lr_start",
        prefix=f"{optim}.",
    )


def _batches(role: str) -> Iterator[Entry]:
    prefix = conversions.PREFIX[role]
    yield converted(
        f"{prefix}.ppo_micro_batch_size_per_gpu",
        f"{role}.ppo_micro_batch_size",
        conversions.micro(role, "ppo_micro_batch_size", dynamic=False),
    )
    yield converted(
        f"{prefix}.ppo_max_token_len_per_gpu",
        f"{role}.ppo_max_token_len",
        conversions.micro(role, "ppo_max_token_len", dynamic=True),
    )
    yield converted(f"{prefix}.use_dynamic_bsz", f"{role}.ppo_max_token_len", lambda _v, _verl: {})
    yield no_effect(
        f"{role}.ppo_micro_batch_size counts responses of each process, as ppo_micro_batch_size_per_gpu does",
        f"{prefix}.ppo_micro_batch_size",
    )
    yield no_effect(
        "mini-batches are dealt at random in each epoch, drawn from trainer.seed",
        "shuffle data_loader_seed",
        prefix=f"{prefix}.",
    )
    yield no_effect("rollout.n is read", f"{prefix}.rollout_n")
    yield no_effect(f"verl's engines read {prefix}.optim.clip_grad; set {role}.optim.grad_clip", f"{prefix}.grad_clip")
    yield no_effect(_CHECKPOINT, f"{prefix}.checkpoint.*")
    yield no_effect(_PROFILE, f"{prefix}.profiler.*")
    yield no_effect(_MEMORY, "ulysses_sequence_parallel_size", prefix=f"{prefix}.")


ENTRIES: tuple[Entry, ...] = (
    *_optimizer("actor"),
    *_optimizer("critic"),
    *_batches("actor"),
    *_batches("critic"),
    # -- loss of the policy
    converted(f"{ACTOR}.clip_ratio", "actor.clip_ratio_low actor.clip_ratio_high", conversions.clip_ratio),
    converted(
        f"{ACTOR}.policy_loss.loss_mode",
        "actor.policy_loss.loss_mode",
        conversions.one_of("actor.policy_loss.loss_mode", {name: name for name in POLICY_LOSSES.names()}),
    ),
    converted(f"{ACTOR}.kl_loss_type", "actor.kl_loss_type", conversions.one_of("actor.kl_loss_type", conversions.KL)),
    no_effect(
        _MEMORY,
        """calculate_entropy calculate_sum_pi_squared entropy_checkpointing entropy_from_logits_chunk_size
        entropy_from_logits_with_chunking pad_to_length use_fused_kernels use_prefix_grouper use_torch_compile""",
        prefix=f"{ACTOR}.",
    ),
    unsupported(_VISION, f"{ACTOR}.freeze_vision_tower"),
    unsupported("weights are not quantized in training", f"{ACTOR}.qat.*", needs=f"{ACTOR}.qat.enable"),
    # -- engine of the actor
    converted("model_engine", "model_engine", conversions.strategy),
    converted(f"{ACTOR}.strategy", "model_engine", conversions.strategy),
    same(f"{ACTOR}.use_remove_padding", "actor.use_remove_padding"),
    converted(
        f"{ACTOR}.fsdp_config.dtype", "fsdp.param_dtype", conversions.one_of("fsdp.param_dtype", conversions.DTYPES)
    ),
    converted(f"{ACTOR}.fsdp_config.fsdp_size", "fsdp.world_size", conversions.if_positive("fsdp.world_size")),
    no_effect("master weights are float32", f"{ACTOR}.fsdp_config.model_dtype"),
    no_effect(_OFFLOAD, "param_offload grad_offload", prefix=f"{ACTOR}.fsdp_config."),
    no_effect(_DETERMINISM, "seed full_determinism", prefix=f"{ACTOR}.fsdp_config."),
    unsupported(
        "weights are not quantized in training",
        f"{ACTOR}.fsdp_config.qat.*",
        needs=f"{ACTOR}.fsdp_config.qat.enable",
    ),
    no_effect(_MEMORY, f"{ACTOR}.fsdp_config.*"),
    converted(
        f"{ACTOR}.megatron.dtype",
        "megatron.param_dtype",
        conversions.one_of("megatron.param_dtype", conversions.DTYPES),
    ),
    converted(f"{ACTOR}.megatron.sequence_parallel", "megatron.sequence_parallel", conversions.sequence_parallel),
    no_effect(
        _LAYOUT,
        """context_parallel_size expert_tensor_parallel_size virtual_pipeline_model_parallel_size
        dynamic_context_parallel max_seqlen_per_dp_cp_rank""",
        prefix=f"{ACTOR}.megatron.",
    ),
    unsupported(
        "weights are not quantized in training", f"{ACTOR}.megatron.qat.*", needs=f"{ACTOR}.megatron.qat.enable"
    ),
    no_effect(
        _MEMORY,
        """recompute_granularity recompute_modules recompute_method recompute_num_layers attention_backend apply_rope_fusion
        gradient_accumulation_fusion moe_enable_deepep moe_permute_fusion moe_token_dispatcher_type moe_grouped_gemm
        bias_activation_fusion bias_dropout_fusion masked_softmax_fusion persist_layer_norm deallocate_pipeline_outputs
        account_for_loss_in_pipeline_split account_for_embedding_in_pipeline_split num_layers_in_first_pipeline_stage
        num_layers_in_last_pipeline_stage""",
        prefix=f"{ACTOR}.megatron.override_transformer_config.",
    ),
    unsupported(
        "the model is built as its config.json says",
        f"{ACTOR}.megatron.override_transformer_config.* {ACTOR}.megatron.override_mcore_model_config.*",
    ),
    no_effect(_DETERMINISM, f"{ACTOR}.megatron.seed"),
    no_effect(_CHECKPOINT, "use_dist_checkpointing dist_checkpointing_path", prefix=f"{ACTOR}.megatron."),
    no_effect(_MEMORY, f"{ACTOR}.megatron.*"),
    no_effect("verl reads it with an engine that is not supported", f"{ACTOR}.torchtitan.* {ACTOR}.veomni.*"),
    # -- the model
    same(f"{MODEL}.use_remove_padding", "actor.use_remove_padding"),
    converted(f"{MODEL}.lora.type", "lora.use_dora", conversions.lora_type),
    only(f"{MODEL}.lora.dropout_position", "pre", why="inputs of an adapter are dropped, not its outputs"),
    only(f"{MODEL}.lora.lora_A_init_method", "xavier", "kaiming", why="A starts as peft starts it"),
    only(f"{MODEL}.lora.lora_B_init_method", "zero", why="B starts at 0"),
    no_effect("adapters are float32", f"{MODEL}.lora.dtype"),
    no_effect(_MEMORY, f"{MODEL}.lora.a2a_experimental"),
    no_effect(
        "with lora.rank greater than 0 the base is frozen",
        "freeze_vision_model freeze_vision_projection freeze_language_model",
        prefix=f"{MODEL}.lora.",
    ),
    unsupported(
        "the folder model.path holds configuration, tokenizer and chat template",
        "hf_config_path tokenizer_path custom_chat_template override_config.* external_lib",
        prefix=f"{MODEL}.",
    ),
    unsupported("there is no multi-token prediction", f"{MODEL}.mtp.*", needs=f"{MODEL}.mtp.enable"),
    no_effect("code of models is never loaded from their folders", f"{MODEL}.trust_remote_code"),
    no_effect(
        _MEMORY,
        "use_shm enable_activation_offload use_liger use_fused_kernels fused_kernel_options.* tiled_mlp.*",
        prefix=f"{MODEL}.",
    ),
    # -- the reference policy
    unsupported("the reference is the policy's first model", f"{REF}.model.*"),
    no_effect(_ONE_ENGINE, f"{REF}.strategy {REF}.fsdp_config.* {REF}.megatron.* {REF}.torchtitan.* {REF}.veomni.*"),
    no_effect("the reference is not trained", f"{REF}.optim.*"),
    no_effect("rollout.n is read", f"{REF}.rollout_n"),
    no_effect(_PROFILE, f"{REF}.profiler.*"),
    no_effect(
        "actor.ppo_micro_batch_size and actor.ppo_max_token_len cut its forward passes as well",
        "log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu log_prob_use_dynamic_bsz log_prob_max_token_len_per_gpu",
        prefix=f"{REF}.",
    ),
    no_effect(
        _MEMORY,
        """entropy_checkpointing entropy_from_logits_chunk_size entropy_from_logits_with_chunking pad_to_length use_torch_compile
        ulysses_sequence_parallel_size""",
        prefix=f"{REF}.",
    ),
    no_effect(_MEMORY, "actor_rollout_ref.hybrid_engine actor_rollout_ref.nccl_timeout"),
    # -- the critic
    converted("critic.loss_agg_mode", "critic.loss_agg_mode", conversions.critic_agg_mode),
    checked("critic.enable", conversions.critic_enable, "algorithm.adv_estimator decides whether there is a critic"),
    checked("critic.model.path", conversions.critic_path, "the critic starts from model.path, the model of the policy"),
    same("critic.model.use_remove_padding", "critic.use_remove_padding"),
    no_effect("verl reads it with seq-mean-token-sum-norm, which the critic does not have", "critic.loss_scale_factor"),
    no_effect(_ONE_ENGINE, "critic.strategy critic.fsdp.* critic.megatron.* critic.torchtitan.* critic.veomni.*"),
    no_effect(
        "critic.ppo_micro_batch_size and critic.ppo_max_token_len cut its forward passes as well",
        "critic.forward_micro_batch_size critic.forward_micro_batch_size_per_gpu critic.forward_max_token_len_per_gpu",
    ),
    no_effect("fsdp.activation_checkpointing is that of all models", "critic.model.enable_gradient_checkpointing"),
    converted("critic.model.lora_rank", "critic.use_lora", conversions.critic_lora),
    converted("critic.model.lora.rank", "critic.use_lora", conversions.critic_lora),
    *(
        checked(key, conversions.critic_adapters(key), "adapters of the critic have the settings of the policy's")
        for key in (
            *(f"critic.model.{name}" for name in ("lora_alpha", "target_modules", "exclude_modules")),
            *(f"critic.model.lora.{name}" for name in ("alpha", "dropout", "target_modules", "exclude_modules")),
        )
    ),
    unsupported(
        "the critic starts from the policy's model",
        "override_config.* external_lib hf_config_path custom_chat_template",
        prefix="critic.model.",
    ),
    no_effect("the critic starts from model.path, the model of the policy", "critic.model.*"),
    no_effect(_MEMORY, "critic.pad_to_length critic.use_torch_compile critic.nccl_timeout"),
)
