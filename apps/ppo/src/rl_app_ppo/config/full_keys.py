"""Keys of the app in texts and logs of the packages, which name their own parameters.

A package writes `RolloutConfig.n`, which is an option, or `CheckpointWriter.keep`, an argument that
the app passes on.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import re
import sys
from collections import defaultdict
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rl_app_ppo.config.schema import AppConfig
from rl_protocol import RLError
from rl_protocol.support.option_tree import list_options

_PARAMETER = re.compile(r"\b[A-Za-z]\w+\.[a-z]\w*")
_PASSED_ON = {
    "CheckpointWriter.folder": "trainer.output_dir",
    "CheckpointWriter.keep": "trainer.max_ckpt_to_keep",
    "DataFiles.filter_overlong_prompts": "data.filter_overlong_prompts",
    "DataFiles.ground_truth_key": "data.ground_truth_key",
    "DataFiles.max_prompt_length": "data.max_prompt_length",
    "DataFiles.on_bad_row": "data.on_bad_row",
    "DataFiles.paths": "data.train_files and data.val_files",
    "DataFiles.prompt_key": "data.prompt_key",
    "Demonstrations.key": "data.answer_key",
    "JudgeScorer.timeout_s": "reward.timeout_s",
    "Layout.sequence_parallel": "megatron.sequence_parallel",
    "NamedCurriculum.name": "data.curriculum",
    "PPOTrainer.resume": "trainer.resume_mode",
    "PromptEncoder.load": "model.path",
    "PromptEncoder.vision": "model.path",
    "PromptOrder.batch_size": "data.train_batch_size",
    "PromptOrder.curriculum": "data.curriculum",
    "PromptOrder.size": "data.train_size",
    "RemoteScorer.timeout_s": "reward.timeout_s",
    "Rendezvous.interface": "trainer.network_interface",
    "SamplingParams.max_new_tokens": "rollout.response_length",
    "SamplingParams.stop_token_ids": "rollout.stop_token_ids",
    "ScorerPool.memory_mb": "reward.memory_mb",
    "ScorerPool.name": "reward.function",
    "ScorerPool.timeout_s": "reward.timeout_s",
    "ServedModelScorer.timeout_s": "reward.timeout_s",
    "TrainSettings.records_experts": "algorithm.router_replay",
    "TrainerParts.hooks": "trainer.hooks",
    "UpdateConfig.use_remove_padding": "actor.use_remove_padding and critic.use_remove_padding",
    "VLLMConfig.tensor_parallel_size": "rollout.tensor_model_parallel_size",
    "find_interface.setting": "trainer.network_interface",
    "hold_out.size": "The number of rows of data.train_files (without data.val_files)",
    "join_world.join_timeout_s": "ray.start_timeout_s",
    "load_model.path": "model.path",
    "load_reward.name": "reward.function",
    "open_files.cache_dir": "model.cache_dir",
    "read_scorer_toml.name": "reward.function",
}
"""Parameters that the app sets from an option of another class."""


@functools.cache
def _keys() -> Mapping[str, str]:
    """Class and name of a parameter -> its key, unless the class has several groups."""
    found: dict[str, set[str]] = defaultdict(set)
    for option in list_options(AppConfig):
        name = option.key.rpartition(".")[2]
        for kind in option.kind.__mro__:
            if dataclasses.is_dataclass(kind) and any(field.name == name for field in dataclasses.fields(kind)):
                found[f"{kind.__name__}.{name}"].add(option.key)
    return {name: next(iter(keys)) for name, keys in found.items() if len(keys) == 1} | _PASSED_ON


def with_full_keys(text: str) -> str:
    """The text, with the key of each parameter that an option of the app sets.

    >>> with_full_keys("The plane is full; raise TransferQueueConfig.capacity_mb.")
    'The plane is full; raise transfer_queue.capacity_mb.'
    """
    return _PARAMETER.sub(lambda found: _keys().get(found[0], found[0]), text)


@contextmanager
def full_keys_in_errors() -> Generator[None]:
    """Put the keys of the app into the errors of a block."""
    try:
        yield
    except RLError as error:
        error.message = with_full_keys(error.message)
        raise


@contextmanager
def full_keys_in_logs() -> Generator[None]:
    """Put the keys of the app into the log records of a block, whichever handler writes them."""
    make = logging.getLogRecordFactory()

    def record(*args: Any, **kwargs: Any) -> logging.LogRecord:
        made = make(*args, **kwargs)
        made.msg, made.args = with_full_keys(made.getMessage()), None
        return made

    logging.setLogRecordFactory(record)
    try:
        yield
    finally:
        logging.setLogRecordFactory(make)


@contextmanager
def adapter_errors(key: str) -> Generator[None]:
    """Put the key of an adapter's path into the errors of a block; policy and critic have one."""
    try:
        yield
    except RLError as error:
        error.message = error.message.replace("LoraConfig.adapter_path", key)
        raise


@contextmanager
def reference_errors() -> Generator[None]:
    """Put the key of the reference policy into the errors of a block that names `model.path`."""
    try:
        yield
    except RLError as error:
        error.message = error.message.replace("model.path=", "reference.path=")
        raise


class FullKeysFormatter(logging.Formatter):
    """The format of every log of a run; records have the keys of the app."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        return with_full_keys(super().format(record))


class RunLog(logging.FileHandler):
    """The log of a process of a run. A line that can't be written, as on a full disk, is missing:
    the outputs of the run say so, and end it.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.setFormatter(FullKeysFormatter())

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the name in logging
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)

    def close(self) -> None:
        with suppress(OSError):
            super().close()
