"""What the workers of a run import, by name, so that one process can import it for all of them."""

from __future__ import annotations

from rl_app_ppo.config.schema import AppConfig

_TORCH_BACKEND = ("rl_trainer.backends.torch_policy", "rl_trainer.backends.parallel_strategy")
_MODELS = "transformers.models.auto.modeling_auto", "transformers.modeling_utils"


def worker_modules(config: AppConfig) -> list[str]:
    """The modules that take long to import and that most workers of the run use."""
    modules = ["rl_app_ppo.worker.torch_setup", "rl_app_ppo.worker.process", "rl_app_ppo.worker.build"]
    if config.model_engine in ("torch", "fsdp"):
        modules += [*_MODELS, *_TORCH_BACKEND]
    if config.rollout.name == "hf":
        modules += [*_MODELS, "rl_trainer.rollout.hf_engine"]
    return list(dict.fromkeys(modules))
