"""Check what a model can be combined with, and that it fits its device and its context."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rl_app_ppo.checks.facts import Facts
from rl_app_ppo.checks.memory import available_bytes, check_memory, matrices, parameters, trained_parameters
from rl_app_ppo.config.full_keys import adapter_errors, reference_errors
from rl_app_ppo.config.model_path import given_reference, is_verl_adapter, read_json
from rl_app_ppo.config.placement import Role
from rl_app_ppo.config.presets import NO_PRESET, of_demo
from rl_app_ppo.config.schema import AppConfig
from rl_app_ppo.config.training_backends import TRAINING_BACKENDS
from rl_app_ppo.demo.demos import DEMOS
from rl_app_ppo.inputs.megatron_model import check_megatron_model
from rl_app_ppo.inputs.tokenizer import load_tokenizer
from rl_app_ppo.inputs.verl_adapter import check_verl_adapter
from rl_app_ppo.inputs.weight_files import check_weights
from rl_protocol import ConfigError
from rl_protocol.support.hf_checkpoint import text_fields
from rl_protocol.support.peft_config import VALUE_HEAD
from rl_trainer import needs_critic
from rl_trainer.config.adapter_folder import check_adapter, join_expert_shapes
from rl_trainer.data.model_families import ROUTED_FAMILIES, why_padded
from rl_trainer.rewards import parse_terms
from rl_trainer.rewards.scorer_toml import RewardModelConfig, is_scorer_toml, read_scorer_toml


def check_described(facts: Facts) -> None:
    """Check that the settings fit a model of which only the config.json may be there.

    Raises:
        ConfigError: they do not; names the key.
    """
    if facts.described is not None:
        _check_settings(facts.config, facts.described)


def _check_settings(config: AppConfig, path: Path) -> None:
    """Check the settings against the config.json in a folder."""
    _check_padding(config, path)
    check_megatron_model(config, path)


def check_model(facts: Facts) -> None:
    """Check that the model is whole, and that the settings fit it, its adapter and the demo.

    Raises:
        ConfigError: it is not, or they do not; names the key.
    """
    config, path = facts.config, facts.model
    if path is not None:
        if facts.sees_images:
            _check_sight(config, path)
        _check_settings(config, path)
        check_weights(path, facts.model_config)
        _check_targets(config, path)
    _check_adapter(config, path, sees_images=facts.sees_images)
    _check_critic_adapter(facts)
    _check_experts(facts)
    config.generator.check_model(facts.model_config, config.rollout)
    if path is not None:
        _check_demo(config, path)


def check_context(facts: Facts) -> None:
    """Check that prompts and responses fit the model's context, vocabulary and batches.

    Raises:
        ConfigError: they do not; names the key and a value that fits.
    """
    config, longest, context = facts.config, facts.longest, facts.context
    response = config.rollout.response_length
    if facts.model is not None:
        _check_vocabulary(facts.model, max(rows.largest_token for rows in facts.data.values()))
    if longest >= context:
        raise ConfigError(
            f"The longest prompt has {longest} tokens, and the model's context is {context}, for prompt and response. Set "
            f"data.max_prompt_length to at most {max(1, context - response)}, which leaves longer prompts out, or choose another model.path."
        )
    if longest + response > context:
        raise ConfigError(
            f"rollout.response_length={response} and the longest prompt of {longest} tokens do not fit the model's "
            f"context of {context}; set rollout.response_length to at most {context - longest}."
        )
    for key, most in (("actor", config.actor.ppo_max_token_len), ("critic", config.critic.ppo_max_token_len)):
        if most and longest + response > most:
            raise ConfigError(
                f"{key}.ppo_max_token_len must hold the longest prompt of {longest} tokens and rollout.response_length={response}; got {most}."
            )


def check_models_fit(facts: Facts) -> None:
    """Check that each model fits into the memory of its device, on this machine.

    Raises:
        ConfigError: one does not; names its parts and what to change.
    """
    config, path = facts.config, facts.model
    if path is None or facts.elsewhere:
        return
    on_gpu: set[Role] = {role for process in facts.planned if process.uses_gpus for role in process.roles}
    weights, trained = parameters(path), trained_parameters(path, config.lora)
    teacher = given_reference(config)
    with reference_errors():
        reference = None if teacher is None else parameters(teacher)
    check_memory(weights, trained, config, available_bytes(), on_gpu, reference)


def _check_demo(config: AppConfig, path: Path) -> None:
    """Check that a demo preset trains the demo model."""
    demo = DEMOS[config.data.demo]
    if not _demo_preset(config) or load_tokenizer(path).get_vocab_size() == len(demo.vocabulary):
        return
    raise ConfigError(
        f"model.path={str(path)!r} is not the demo model (its vocabulary differs), and preset={_demo_preset(config)}, which applies when "
        f"data.train_files is empty, is for that model alone. Set data.train_files to train on your data, or preset={NO_PRESET} "
        "to train this model on the demo's task."
    )


def _demo_preset(config: AppConfig) -> str:
    """The demo's preset that applies; empty: none."""
    return next((name for name in config.preset if of_demo(name)), "")


def _check_sight(config: AppConfig, path: Path) -> None:
    """Check the settings that a vision model can't be combined with."""
    engines = tuple(name for name, backend in TRAINING_BACKENDS.items() if backend.images)
    wanted: dict[str, tuple[object, tuple[object, ...]]] = {
        "rollout.name": (config.rollout.name, (config.rollout.name if config.generator.images else "hf",)),
        "model_engine": (config.model_engine, engines),
    }
    for key, (got, fitting) in wanted.items():
        if got not in fitting:
            need = " or ".join(map(str, fitting))
            raise ConfigError(f"model.path={str(path)!r} sees images, for which {key} must be {need}; got {got}.")
    for term in parse_terms(config.reward.function):
        if is_scorer_toml(term.name) and isinstance(read_scorer_toml(term.name), RewardModelConfig):
            raise ConfigError(
                f"model.path={str(path)!r} sees images, which the reward model {term.name} would not; leave it out of reward.function."
            )


def _check_adapter(config: AppConfig, path: Path | None, *, sees_images: bool) -> None:
    """Check that the policy can start from a given adapter, and that the rollout gets it."""
    if not config.lora.adapter_path:
        return
    if is_verl_adapter(config.lora.adapter_path):
        check_verl_adapter(config, path)
    else:  # vision models name their modules otherwise in files
        check_adapter(config.lora, None if path is None or sees_images else matrices(path))
    if not config.checkpoint_engine.enabled:
        raise ConfigError(
            f"lora.adapter_path={config.lora.adapter_path!r} needs checkpoint_engine.enabled=true, by which the rollout gets the adapter; got "
            "false."
        )


def _check_critic_adapter(facts: Facts) -> None:
    """Check that the critic can start from a given adapter."""
    config, path, hidden = facts.config, facts.model, facts.model_config.get("hidden_size")
    if not config.critic.adapter_path:
        return
    known = path is not None and not facts.sees_images
    base = matrices(path) | {VALUE_HEAD: (1, int(hidden))} if path is not None and known and hidden else None
    with adapter_errors("critic.adapter_path"):
        check_adapter(replace(config.lora, adapter_path=config.critic.adapter_path), base, value_head=True)


def _check_experts(facts: Facts) -> None:
    """Check that the model has experts that can be replayed."""
    replay, path = facts.config.algorithm.router_replay, facts.config.model.path
    if replay != "disabled" and facts.routed_layers is None:
        named = (
            f"model.path={path!r}, of model_type={facts.model_config.get('model_type')!r}" if path else "the demo model"
        )
        raise ConfigError(
            f"algorithm.router_replay={replay} needs a model with experts, of model_type {', '.join(ROUTED_FAMILIES)}; got {named}. Set "
            "algorithm.router_replay=disabled, or another model.path."
        )


def _check_targets(config: AppConfig, path: Path) -> None:
    """Check that the model has the modules that get adapters, and that those of experts can."""
    weights = [name.split(".") for name in matrices(path)]
    if not config.lora.rank or not weights:  # they are in no safetensors file
        return
    present = {parts[-1] for parts in weights if "experts" not in parts}
    inside = {parts[-1] for parts in weights if "experts" in parts} - present
    targets = config.lora.targets()
    missing = [name for name in targets if name not in present | inside]
    of_experts = [name for name in targets if name in inside]
    reason = _why_not_experts(config) if of_experts else ""
    if not missing and not reason:
        for name in join_expert_shapes(matrices(path)):
            config.lora.covers_weight(name)  # raises if it takes a part of it
        return
    left = [name for name in targets if name in present or (name in inside and not reason)]
    why = "which this model does not have" if missing else f"of experts, {reason}"
    remedy = f"lora.target_modules=[{','.join(left)}]" if left else "lora.rank=0"
    raise ConfigError(f"lora.target_modules names {', '.join(missing or of_experts)}, {why}. Set {remedy}.")


def _why_not_experts(config: AppConfig) -> str:
    """Why experts get no adapters under these settings; empty: they do."""
    if config.model_engine == "torch" and config.engine.computes_in != "float32":
        return (
            f"whose adapters need torch.param_dtype=float32, or another model_engine; got {config.engine.computes_in}"
        )
    if config.lora.dropout:
        return "for which peft says: lora.ParamWrapper does not work with lora_dropout != 0"
    if config.lora.use_dora:
        return "for which peft says: lora.ParamWrapper does not work with use_dora=True"
    if needs_critic(config.algorithm) and config.critic.use_lora:
        return "whose adapters need critic.use_lora=false"
    if config.rollout.name != "hf" and not config.lora.merge:
        return f"whose adapters need rollout.name=hf or lora.merge=true; got rollout.name={config.rollout.name}"
    return ""


def _check_padding(config: AppConfig, path: Path) -> None:
    """Check that sequences are padded where the model's can't be joined."""
    reason = why_padded(str(read_json(path / "config.json", str(path)).get("model_type", "")))
    joined = {
        "actor.use_remove_padding": config.actor.use_remove_padding,
        "critic.use_remove_padding": needs_critic(config.algorithm) and config.critic.use_remove_padding,
    }
    for key, value in joined.items():
        if value and reason:
            raise ConfigError(f"model.path={str(path)!r} {reason}; {key} must be False, got {value}.")


def _check_vocabulary(path: Path, largest: int) -> None:
    """Check that the model has an embedding for every token of the prompts."""
    size = text_fields(read_json(path / "config.json", str(path))).get("vocab_size")
    if isinstance(size, int) and largest >= size:
        raise ConfigError(
            f"model.path={str(path)!r}: the prompts hold token {largest}, and the model's vocab_size is {size}: tokenizer and model do not "
            "belong together. Save the model's own tokenizer in its folder, or call model.resize_token_embeddings(len(tokenizer)) and save "
            "both again."
        )
