"""Keys of the app in messages of the packages, which name parameters of their own classes."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections import defaultdict
from collections.abc import Generator, Mapping
from contextlib import contextmanager

from rl_app_ppo.config.schema import AppConfig
from rl_protocol import RLError
from rl_protocol.support.option_tree import list_options

_PARAMETER = re.compile(r"\b[A-Z]\w+\.[a-z]\w*")
_PASSED_ON = {
    "SamplingParams.max_new_tokens": "rollout.response_length",
    "VLLMConfig.tensor_parallel_size": "rollout.tensor_model_parallel_size",
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


def with_full_keys(message: str) -> str:
    """The message, with the key of each parameter that an option of the app sets.

    >>> with_full_keys("The plane is full; raise TransferQueueConfig.capacity_mb.")
    'The plane is full; raise transfer_queue.capacity_mb.'
    """
    return _PARAMETER.sub(lambda found: _keys().get(found[0], found[0]), message)


@contextmanager
def full_keys_in_errors() -> Generator[None]:
    """Put the keys of the app into the errors of a block."""
    try:
        yield
    except RLError as error:
        error.message = with_full_keys(error.message)
        raise
