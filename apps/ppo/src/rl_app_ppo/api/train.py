"""`train()`: a run from Python, with the settings and the result of the command line's."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from rl_app_ppo.api.command_console import RunConsole
from rl_app_ppo.api.data_argument import Data, check_data, data_files
from rl_app_ppo.api.launch import launch
from rl_app_ppo.api.model_argument import Pretrained, check_model, model_path
from rl_app_ppo.api.quiet import quiet_libraries
from rl_app_ppo.api.result import TrainResult
from rl_app_ppo.api.reward_argument import (
    Reward,
    RewardModules,
    check_rewards,
    reward_function,
)
from rl_app_ppo.cluster.environment import environment
from rl_app_ppo.config.loading import load_config, parse_override
from rl_app_ppo.config.plain_yaml import flatten
from rl_app_ppo.config.presets import Source
from rl_app_ppo.config.schema import RayConfig
from rl_ckpt_engine import load_policy
from rl_protocol import ConfigError
from rl_protocol.support.trusted_files import given_files, variables_for

Options = Mapping[str, Any] | Sequence[str]
"""Settings by key, dotted or nested, or `key=value` strings as on the command line."""
_ARGUMENTS = "arguments of train()"
_CACHE = "model.cache_dir"


def train(
    model: str | Path | Pretrained | None = None,
    train_dataset: Data | None = None,
    reward: Reward | Sequence[Reward] | None = None,
    *,
    val_dataset: Data | None = None,
    tokenizer: Pretrained | None = None,
    reward_weights: Sequence[float] | None = None,
    options: Options = (),
    trust: Sequence[str | Path] = (),
    quiet: bool = False,
    **settings: Any,
) -> TrainResult:
    """Train a language model, as `uv run apps/ppo` does; without arguments, train the demo.

    Starts the processes of the run, waits for its end and stops them. Inside a running event loop,
    such as that of a notebook, the run has its own loop in another thread, and the caller waits.

    Args:
        model: a checkpoint folder, the name of a model in the local Hugging Face cache, or a
            transformers model (`model.path`).
        train_dataset: files as in `data.train_files`, rows in their format as a list of dicts, or a
            `datasets.Dataset` of such rows.
        reward: a name as in `reward.function`, a function `(data_source, solution_str,
            ground_truth, extra_info)` as verl's `compute_score`, or a list of these, which are
            added up. Functions run in processes of their own. A function of an importable module is
            imported there; one of a script or notebook is copied with the imports, functions and
            constants that it uses.
        val_dataset: as `train_dataset` (`data.val_files`).
        tokenizer: the tokenizer or processor of a `model` that is an object.
        reward_weights: a factor for each reward; None: 1.
        options: settings as on the command line: `{"rollout.n": 8}`, `{"rollout": {"n": 8}}` or
            `["rollout.n=8"]`.
        trust: files of code that settings name as `path.py:name` and that may run, as `--trust`.
        quiet: print nothing, also no progress bars and warnings of transformers, datasets and Ray.
        **settings: more settings, which win over `options`: `algorithm="ppo", rollout={"n": 8}`.

    Raises:
        ConfigError: an argument or a setting is wrong, and named; or another thread of this process
            trains. No process has started.
        OutputError: a folder can't be written.
        RLError: the run failed; its processes have ended.
        KeyboardInterrupt: it was interrupted; its processes have ended.
    """
    arguments = _Arguments(model, tokenizer, train_dataset, val_dataset, reward, reward_weights)
    with _alone(), quiet_libraries() if quiet else nullcontext():
        allowed = given_files(map(Path, trust), "trust")
        return _train(arguments, _layers(options, settings), allowed, RunConsole(highlight=False, quiet=quiet))


_running: dict[int, object] = {}
"""This process -> its run; a fork has none."""


@contextmanager
def _alone() -> Generator[None]:
    """Be the only run of this process: runs share its environment, its logging and Ray.

    Raises:
        ConfigError: there is another one, in another thread.
    """
    me = object()
    if _running.setdefault(os.getpid(), me) is not me:
        raise ConfigError(
            "train() runs in another thread of this process already. Wait for its end, or call train() in another process."
        )
    try:
        yield
    finally:
        del _running[os.getpid()]


def _train(arguments: _Arguments, layers: Sequence[Source], trusted: Mapping[str, str], out: Console) -> TrainResult:
    modules = arguments.check()
    # checks the settings before anything is written; objects stand for their paths by their names
    keys = arguments.values(modules.written(None), None)
    _refuse_both(keys, layers)
    used = (_CACHE,) if arguments.has_objects else ()
    with environment(variables_for(trusted)):
        config = load_config(given=[*layers, (_ARGUMENTS, keys)], used=used)
        _check_ray(config.ray)
        cache = Path(config.model.cache_dir).expanduser().absolute()
        files = modules.written(cache)
        config = load_config(given=[*layers, (_ARGUMENTS, arguments.values(files, cache))], used=used)
        return launch(config, load_policy(), out, variables_for(given_files(files.values(), "reward")))


def _check_ray(config: RayConfig) -> None:
    if "ray" in sys.modules:
        from rl_app_ppo.cluster.ray_session import check_ray_is_free  # imports Ray

        check_ray_is_free(config)


@dataclass(frozen=True)
class _Arguments:
    """The arguments that may be objects."""

    model: str | Path | Pretrained | None
    tokenizer: Pretrained | None
    train_dataset: Data | None
    val_dataset: Data | None
    reward: Reward | Sequence[Reward] | None
    reward_weights: Sequence[float] | None

    def check(self) -> RewardModules:
        """Check the arguments without writing anything.

        Raises:
            ConfigError: one is wrong.
        """
        if self.model is not None or self.tokenizer is not None:
            check_model(self.model, self.tokenizer)
        for name, data in self._datasets().values():
            check_data(name, data)
        if self.reward is None and self.reward_weights is not None:
            raise ConfigError("reward_weights has no effect without reward.")
        return RewardModules() if self.reward is None else check_rewards(self.reward, self.reward_weights)

    def values(self, files: Mapping[str, Path], cache: Path | None) -> dict[str, str]:
        """Key -> value of every argument that is given.

        Args:
            files: the file of each reward function that is an object.
            cache: folder into which objects are written; None: they are not, and names stand for
                their paths.

        Raises:
            OutputError: the cache can't be written.
        """
        values = {key: data_files(name, data, cache) for key, (name, data) in self._datasets().items()}
        if self.model is not None:
            values["model.path"] = model_path(self.model, self.tokenizer, cache)
        if self.reward is not None:
            values["reward.function"] = reward_function(self.reward, self.reward_weights, files)
        return values

    @property
    def has_objects(self) -> bool:
        """Whether there is an argument that `values` writes into the cache."""
        rewards = self.reward if isinstance(self.reward, Sequence) else [self.reward]
        functions = self.reward is not None and not all(isinstance(one, str) for one in rewards)
        return functions or not (self.model is None or isinstance(self.model, str | Path))

    def _datasets(self) -> dict[str, tuple[str, Data]]:
        """Key -> argument and its value."""
        found = {
            "data.train_files": ("train_dataset", self.train_dataset),
            "data.val_files": ("val_dataset", self.val_dataset),
        }
        return {key: (name, data) for key, (name, data) in found.items() if data is not None}


def _layers(options: Options, settings: Mapping[str, Any]) -> list[Source]:
    """The origin and the settings by dotted key of `options` and of the keywords, weakest first."""
    if isinstance(options, Mapping):
        values = _flat(options)
    elif isinstance(options, str):
        raise ConfigError(f'options must be a dict, or a list of texts such as ["rollout.n=8"]; got {options!r}.')
    else:
        values = dict(parse_override(word) for word in options)
    return [("options", values), ("keywords of train()", _flat(settings))]


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: str(value) if isinstance(value, Path) else value for key, value in flatten(dict(values)).items()}


def _refuse_both(keys: Mapping[str, str], layers: Sequence[Source]) -> None:
    for key in keys:
        for origin, values in layers:
            if key in values:
                raise ConfigError(
                    f"{key} is set twice: by an argument of train(), and in {origin}. Leave one of them out."
                )
