"""Facts about a configuration and this machine, which the checks read; computed on first use."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import chain, count
from pathlib import Path
from typing import Any

from rl_app_ppo.checks.machine import gpu_memory, gpus_found
from rl_app_ppo.checks.role_memory import ModelSize
from rl_app_ppo.checks.weight_engine import check_sync
from rl_app_ppo.config.devices import PlannedProcess, plan_processes
from rl_app_ppo.config.loading import algorithm_label
from rl_app_ppo.config.model_path import described_model, given_model, model_context, read_json
from rl_app_ppo.config.placement import Role, rollout_in_actor
from rl_app_ppo.config.schema import LOCAL, AppConfig
from rl_app_ppo.demo.demos import DEMOS
from rl_app_ppo.demo.settings import ModelSettings
from rl_app_ppo.demo.tokenizer import demo_tokenizer
from rl_app_ppo.inputs.data import open_data
from rl_app_ppo.inputs.epochs import with_length
from rl_app_ppo.inputs.input_files import InputFiles, input_files
from rl_app_ppo.inputs.session import check_rows, session_of
from rl_app_ppo.inputs.tokenizer import load_tokenizer, vision_of
from rl_app_ppo.outputs.resume import Start, find_start
from rl_ckpt_engine import CheckpointEngine, PluginPolicy
from rl_trainer import StepGraph, build_graph
from rl_trainer.data.images import PROCESSORS, Vision
from rl_trainer.data.model_families import RoutedLayers
from rl_trainer.data.validation_split import PreparedPrompts


class Facts:
    """A configuration, and what it means on this machine.

    A property raises ConfigError or OutputError when the configuration can't be used; a check that
    reads it needs the check that reports that error.

    Args:
        config: the configuration of the run.
        plugins: which plug-ins of the weight synchronization the operator allows.
        supposed_gpus: GPUs of each node of another machine, for a plan; None: look at this machine.
    """

    def __init__(self, config: AppConfig, plugins: PluginPolicy, supposed_gpus: int | None = None) -> None:
        self.config = config
        self.plugins = plugins
        self.supposed_gpus = supposed_gpus

    @property
    def elsewhere(self) -> bool:
        """The workers run on a machine that can't be looked at."""
        return self.supposed_gpus is not None or self.config.ray.address != LOCAL

    @cached_property
    def graph(self) -> StepGraph:
        """The graph of a step."""
        config = self.config
        return build_graph(
            config.algorithm, config.actor, images=self.sees_images, kept=config.rollout.records_kept_sets
        )

    @cached_property
    def sync(self) -> type[CheckpointEngine]:
        """The weight engine."""
        together = rollout_in_actor(self.config.placement)
        return check_sync(self.config.checkpoint_engine, self.plugins, one_process=together)

    @cached_property
    def model(self) -> Path | None:
        """Folder of the model; None: the demo model, which need not exist yet."""
        return given_model(self.config)

    @cached_property
    def described(self) -> Path | None:
        """Folder with the config.json of the model, which may have no weights; None: the demo's."""
        return described_model(self.config)

    @cached_property
    def role_sizes(self) -> Callable[[Role], ModelSize]:
        """The sizes of the model that a role has."""
        from rl_app_ppo.checks.process_memory import role_sizes  # torch

        return role_sizes(self.described, self.config)

    @cached_property
    def model_config(self) -> Mapping[str, Any]:
        """The model's config.json."""
        path = self.model
        return (
            {"num_attention_heads": ModelSettings().heads}
            if path is None
            else read_json(path / "config.json", str(path))
        )

    @cached_property
    def routed_layers(self) -> RoutedLayers | None:
        """The layers of the model whose experts can be replayed; None: it has none."""
        path = self.described
        return None if path is None else RoutedLayers.of(read_json(path / "config.json", str(path)))

    @cached_property
    def context(self) -> int:
        """Most tokens of a prompt and its response."""
        return ModelSettings().context if self.model is None else model_context(self.model)

    @cached_property
    def sight(self) -> Vision | None:
        """How the model reads images; None: it reads only text."""
        return None if self.model is None else vision_of(self.model)

    @property
    def sees_images(self) -> bool:
        """Whether the model reads images."""
        return self.sight is not None

    @cached_property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return (
            demo_tokenizer(DEMOS[self.config.data.demo].vocabulary)
            if self.model is None
            else load_tokenizer(self.model)
        )

    @cached_property
    def data(self) -> Mapping[str, PreparedPrompts]:
        """The prompts by split."""
        data = open_data(self.config, self.model)
        check_rows(session_of(self.config, self.model), data)
        return data

    @cached_property
    def inputs(self) -> InputFiles:
        """The files that the run reads."""
        return input_files(self.config, self.data)

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(rows.longest for rows in self.data.values())

    @cached_property
    def image_tokens(self) -> int:
        """Most tokens of a prompt that stand for images."""
        return max(rows.most_image_tokens for rows in self.data.values())

    @cached_property
    def planned_image_tokens(self) -> int:
        """Those of a prompt with one image, as large as the model's processor leaves it and the
        length of prompts allows; if the model reads images. The processor may not be there yet.
        """
        path, most = self.described, self.config.data.max_prompt_length
        if path is None or not any((path / name).exists() for name in PROCESSORS):
            return most
        sight = vision_of(path)
        return most if sight is None else min(most, sight.most_tokens)

    @cached_property
    def gpus(self) -> int:
        """GPUs of each node."""
        return gpus_found() if self.supposed_gpus is None else self.supposed_gpus

    @cached_property
    def gpu_bytes(self) -> int:
        """Memory of the smallest GPU that a process would use here; 0: none would."""
        return gpu_memory() if any(process.gpus for process in self.planned) else 0

    @cached_property
    def planned(self) -> Sequence[PlannedProcess]:
        """The processes of the run."""
        return plan_processes(self.config, self.gpus)

    @cached_property
    def output(self) -> Path:
        """The folder of all runs."""
        return Path(self.config.trainer.output_dir).expanduser()

    @cached_property
    def folder(self) -> Path:
        """The folder of the run, named by the time unless trainer.run_name is set.

        Runs that start in the same second get different names.
        """
        trainer = self.config.trainer
        if trainer.run_name:
            return self.output / trainer.run_name
        stamp = time.strftime(f"%Y-%m-%d_%H-%M-%S_{algorithm_label(self.config)}_seed{trainer.seed}")
        names = chain((stamp,), (f"{stamp}_{number}" for number in count(2)))
        return next(folder for name in names if not (folder := self.output / name).exists())

    @cached_property
    def with_steps(self) -> AppConfig:
        """The configuration, with trainer.total_epochs as steps."""
        return with_length(self.config)

    @cached_property
    def start(self) -> Start:
        """Where the run starts."""
        return find_start(self.with_steps, self.folder, self.inputs)
