"""Pytest plugin that implements some methods of the controller actor with the public API.

`get_partition_snapshot`, `list_partitions` and `clear_partition` are internals of 0.1.11. Its tests
use them to check results that users can also see through the public API.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import rl_transferqueue.compat as tq


@pytest.fixture(scope="session", autouse=True)
def _controller_of_the_tests() -> Iterator[None]:
    try:
        import ray
    except ModuleNotFoundError:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        found = ray.get_actor
        patch.setattr(ray, "get_actor", lambda *args, **kwargs: _Controller(found(*args, **kwargs), ray.put))
        yield


class _Controller:
    """The controller actor with the methods below added."""

    def __init__(self, actor: Any, as_reference: Callable[[Any], Any]) -> None:
        self._actor = actor
        for method in (self._list_partitions, self._clear_partition, self._get_partition_snapshot):
            name = method.__name__.removeprefix("_")
            setattr(self, name, SimpleNamespace(remote=lambda *args, method=method: as_reference(method(*args))))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._actor, name)

    def _list_partitions(self) -> list[str]:
        return tq.get_client().get_partition_list()

    def _clear_partition(self, partition: str) -> None:
        tq.get_client().clear_partition(partition)

    def _get_partition_snapshot(self, partition: str) -> SimpleNamespace | None:
        client, tags = tq.get_client(), tq.kv_list(partition).get(partition)
        if tags is None:
            return None
        rows = client.kv_retrieve_meta(list(tags), partition)
        index_of = dict(zip(tags, rows.global_indexes, strict=True))
        fields = sorted({name for key in tags for name in client.kv_retrieve_meta(key, partition).field_names})
        produced = np.zeros((max(rows.global_indexes) + 1, len(fields)), np.int8)
        indexes, flags = client.get_production_status(fields, partition)
        if indexes is not None and flags is not None:
            produced[indexes.numpy()] = flags.numpy()
        return SimpleNamespace(
            global_indexes=set(rows.global_indexes),
            keys_mapping=index_of,
            custom_meta={index_of[key]: tag for key, tag in tags.items()},
            field_name_mapping={name: column for column, name in enumerate(fields)},
            production_status=produced,
        )
