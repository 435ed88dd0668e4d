"""Check everything about a run that can be checked before a process starts."""

from __future__ import annotations

from pathlib import Path

from rl_app_ppo.checks.machine import (
    check_cluster,
    check_gpus,
    check_hosts,
    check_installed_engines,
    check_network,
    gpu_memory,
    gpus_found,
)
from rl_app_ppo.checks.memory import (
    available_bytes,
    check_memory,
    check_plane_size,
    matrices,
    parameters,
    step_bytes,
    trained_parameters,
)
from rl_app_ppo.checks.reference import check_reference
from rl_app_ppo.checks.rewards import check_rewards, check_source
from rl_app_ppo.checks.weight_engine import check_sync
from rl_app_ppo.config.devices import plan_processes
from rl_app_ppo.config.full_keys import full_keys_in_errors
from rl_app_ppo.config.model_path import given_model, given_reference, model_context, read_json
from rl_app_ppo.config.placement import Role, rollout_in_actor
from rl_app_ppo.config.presets import NO_PRESET, of_demo
from rl_app_ppo.config.schema import AppConfig
from rl_app_ppo.config.training_backends import TRAINING_BACKENDS
from rl_app_ppo.demo.demos import DEMOS
from rl_app_ppo.demo.settings import ModelSettings
from rl_app_ppo.demo.tokenizer import demo_tokenizer
from rl_app_ppo.inputs.data import check_answers, open_data, train_order
from rl_app_ppo.inputs.session import check_rows, session_of
from rl_app_ppo.inputs.tokenizer import load_tokenizer, session_tokenizer, vision_of
from rl_app_ppo.outputs.metric_sinks import check_installed, logger_names
from rl_app_ppo.outputs.run_journal import check_kept_rows
from rl_ckpt_engine import PluginPolicy
from rl_protocol import ConfigError
from rl_trainer import StepGraph, build_graph, needs_critic
from rl_trainer.config.adapter_folder import check_adapter
from rl_trainer.data.model_families import why_padded
from rl_trainer.driver.hooks import named_hooks
from rl_trainer.rewards import parse_terms
from rl_trainer.rewards.scorer_toml import RewardModelConfig, is_scorer_toml, read_scorer_toml
from rl_transferqueue import check_plane


@full_keys_in_errors()
def preflight(config: AppConfig, plugins: PluginPolicy) -> StepGraph:
    """Check a configuration; returns the graph of its steps.

    Args:
        config: the configuration of the run.
        plugins: which plug-ins of the weight synchronization the operator allows.

    Raises:
        ConfigError: a check failed; names the key.
    """
    graph = build_graph(config.algorithm, config.actor)
    check_rewards(config.reward)
    sync = check_sync(config.checkpoint_engine, plugins, one_process=rollout_in_actor(config.placement))
    check_installed(logger_names(config.trainer.logger))
    named_hooks(config.trainer.hooks)
    path, demo = given_model(config), ModelSettings()
    context = demo.context if path is None else model_context(path)
    if path is not None and vision_of(path) is not None:
        _check_sight(config, path)
        graph = build_graph(config.algorithm, config.actor, images=True)
    if path is not None:
        _check_padding(config, path)
    _check_adapter(config, path)
    check_installed_engines(config)
    check_network(config)
    check_cluster(config)
    check_hosts(config, one_host=sync.capabilities.same_host_only)
    check_gpus(config, sync.capabilities.devices)
    check_kept_rows(config)
    check_plane(config.transfer_queue)
    described = {"num_attention_heads": demo.heads} if path is None else read_json(path / "config.json", str(path))
    config.generator.check_model(described, config.rollout)
    _check_demo(config, path)
    data = open_data(config, path)
    check_rows(session_of(config, path), data)
    train_order(config, data["train"]).rows(0)  # raises if the curriculum can't order these rows
    for rows in data.values():
        if len(rows):
            check_source(config.reward, rows[0].data_source)
    longest = max(rows.longest for rows in data.values())
    if path is not None:
        _check_vocabulary(path, max(rows.largest_token for rows in data.values()))
    tokenizer = load_tokenizer(path) if path is not None else demo_tokenizer(DEMOS[config.data.demo].vocabulary)
    if config.demonstrates:
        check_answers(config, session_tokenizer(tokenizer), data["train"])
    check_reference(config, tokenizer.get_vocab(), longest + config.rollout.response_length)
    check_plane_size(config, step_bytes(config, graph, longest, len(data["val"]) if "val" in data else 0))
    if path is not None and config.ray.address == "local":
        _check_models_fit(config, path)
    if longest >= context:
        raise ConfigError(
            f"The longest prompt has {longest} tokens, and the model's context is {context}, for prompt and response. Set "
            f"data.max_prompt_length to at most {max(1, context - config.rollout.response_length)}, which leaves longer prompts out, or choose "
            "another model.path."
        )
    if longest + config.rollout.response_length > context:
        raise ConfigError(
            f"rollout.response_length={config.rollout.response_length} and the longest prompt of {longest} tokens do not fit the model's "
            f"context of {context}; set rollout.response_length to at most {context - longest}."
        )
    for key, most in (("actor", config.actor.ppo_max_token_len), ("critic", config.critic.ppo_max_token_len)):
        if most and longest + config.rollout.response_length > most:
            raise ConfigError(
                f"{key}.ppo_max_token_len must hold the longest prompt of {longest} tokens and rollout.response_length="
                f"{config.rollout.response_length}; got {most}."
            )
    return graph


def _check_models_fit(config: AppConfig, path: Path) -> None:
    """Check that each model fits into the memory of its device, on this machine."""
    planned = plan_processes(config, gpus_found())
    on_gpu: set[Role] = {role for process in planned if process.gpus for role in process.roles}
    weights, trained = parameters(path), trained_parameters(path, config.lora)
    teacher = given_reference(config)
    reference = None if teacher is None else parameters(teacher)
    check_memory(weights, trained, config, available_bytes(), on_gpu, reference)
    if on_gpu:
        from rl_app_ppo.checks.gpu_memory import check_gpu_memory  # torch: a run on the CPU checks without

        check_gpu_memory(path, config, planned, gpu_memory())


def _check_demo(config: AppConfig, path: Path | None) -> None:
    """Check that a demo preset trains the demo model."""
    demo = DEMOS[config.data.demo]
    if path is None or not _demo_preset(config) or load_tokenizer(path).get_vocab_size() == len(demo.vocabulary):
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
        "actor.use_remove_padding": (config.actor.use_remove_padding, (False,)),
        "critic.use_remove_padding": (needs_critic(config.algorithm) and config.critic.use_remove_padding, (False,)),
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


def _check_adapter(config: AppConfig, path: Path | None) -> None:
    """Check that the policy can start from a given adapter, and that the rollout gets it."""
    if not config.lora.adapter_path:
        return
    known = path is not None and vision_of(path) is None  # other families name their modules otherwise in files
    check_adapter(config.lora, matrices(path) if path is not None and known else None)
    if not config.checkpoint_engine.enabled:
        raise ConfigError(
            f"lora.adapter_path={config.lora.adapter_path!r} needs checkpoint_engine.enabled=true, by which the rollout gets the adapter; got "
            "false."
        )


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
    described = read_json(path / "config.json", str(path))
    size = described.get("vocab_size", (described.get("text_config") or {}).get("vocab_size"))
    if isinstance(size, int) and largest >= size:
        raise ConfigError(
            f"model.path={str(path)!r}: the prompts hold token {largest}, and the model's vocab_size is {size}: tokenizer and model do not "
            "belong together. Save the model's own tokenizer in its folder, or call model.resize_token_embeddings(len(tokenizer)) and save "
            "both again."
        )
