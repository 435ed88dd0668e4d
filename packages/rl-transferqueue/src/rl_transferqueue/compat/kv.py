"""The key-value functions of 0.1.11, each also as `async_`; they use the client of this process (see `runtime`)."""

from __future__ import annotations

import functools
import inspect
import json
import shutil
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import torch
from tensordict import NonTensorStack, TensorDict

from rl_protocol.errors import BatchError, OutputError
from rl_protocol.meta import KVBatchMeta as Rows
from rl_transferqueue.compat import checkpoint
from rl_transferqueue.compat.core import Core, Parser
from rl_transferqueue.compat.errors import FieldNotFoundError
from rl_transferqueue.compat.metadata.kv_batch_meta import KVBatchMeta, Meta
from rl_transferqueue.compat.objects import unpack_tag
from rl_transferqueue.compat.runtime import get_client

P = ParamSpec("P")
T = TypeVar("T")
Method = Callable[Concatenate[Core, P], Coroutine[Any, Any, T]]

_METADATA_FILE = "metadata.json"


def _blocking(method: Method[P, T]) -> Callable[P, T]:
    """The method on the core of this process's client, as a function that waits."""

    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        client = get_client()
        return client.portal.run(method(client.core, *args, **kwargs))

    return cast("Callable[P, T]", _dressed(call, method))


def _async(method: Method[P, T]) -> Callable[P, Coroutine[Any, Any, T]]:
    """The same, to be awaited on any loop."""

    async def call(*args: P.args, **kwargs: P.kwargs) -> T:
        client = get_client()
        return await client.hopping(method)(client.core, *args, **kwargs)

    return cast("Callable[P, Coroutine[Any, Any, T]]", _dressed(call, method))


def _dressed(call: Any, method: Any) -> Any:
    """`call` with the name, text and arguments of `method`, less its first."""
    functools.update_wrapper(call, method)
    call.__name__ = call.__qualname__ = method.__name__.lstrip("_")
    signature = inspect.signature(method)
    call.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])
    return call


def _list(names: Sequence[str] | str) -> list[str]:
    return [names] if isinstance(names, str) else list(names)


def _described(rows: Rows) -> KVBatchMeta:
    return KVBatchMeta(list(rows.keys), [unpack_tag(tag) for tag in rows.tags], rows.partition, sorted(rows.fields))


async def _kv_put(
    core: Core,
    key: str,
    partition_id: str,
    fields: TensorDict | dict[str, Any] | None = None,
    tag: dict[str, Any] | None = None,
    data_parser: Parser | None = None,
) -> KVBatchMeta:
    """Store fields and tags of one row.

    Args:
        core: the client's operations.
        key: name of the row; a row that is there grows by the fields and tags.
        partition_id: where it is.
        fields: a dict of tensors (without batch dimension) and other values, or a TensorDict of batch size [1].
        tag: facts about the row: numbers, strings, bools, None.
        data_parser: changes the fields (name -> tensor or list) before they are stored, in place or by what it returns; it runs here.

    Returns:
        The row with all its fields and tags.

    Raises:
        BatchError: neither fields nor tag; nested tensors in a dict.
    """
    if fields is None and tag is None:
        raise BatchError("kv_put needs fields or a tag.")
    table = _one_row(fields) if isinstance(fields, dict) else fields
    return _described(await core.put_rows([key], partition_id, table, None if tag is None else [tag], data_parser))


def _one_row(fields: dict[str, Any]) -> TensorDict:
    row: dict[str, object] = {}
    for name, value in fields.items():
        if isinstance(value, torch.Tensor) and value.is_nested:
            raise BatchError(f"Field {name!r} is nested, which one row can't be; use kv_batch_put.")
        row[name] = value.unsqueeze(0) if isinstance(value, torch.Tensor) else NonTensorStack(value)
    return TensorDict(row, batch_size=[1])


async def _kv_batch_put(
    core: Core,
    keys: list[str],
    partition_id: str,
    fields: TensorDict | None = None,
    tags: list[dict[str, Any]] | None = None,
    data_parser: Parser | None = None,
) -> KVBatchMeta:
    """Store fields and tags of N rows, all or nothing.

    Args:
        core: the client's operations.
        keys: [N] names of the rows; rows that are there grow by the fields and tags.
        partition_id: where they are.
        fields: a TensorDict of batch size [N].
        tags: [N] facts about the rows.
        data_parser: changes the fields (name -> tensor or list) before they are stored, in place or by what it returns; it runs here.

    Returns:
        The rows with all the fields that each of them has, and all their tags.

    Raises:
        BatchError: neither fields nor tags, or not one row per key.
        DuplicateKeyError: a key named twice.
    """
    if fields is None and tags is None:
        raise BatchError("kv_batch_put needs fields or tags.")
    if fields is not None and int(fields.batch_size[0]) != len(keys):
        raise BatchError(f"kv_batch_put needs one row per key: {len(keys)} keys, {int(fields.batch_size[0])} rows.")
    return _described(await core.put_rows(keys, partition_id, fields, tags, data_parser))


async def _kv_batch_get(
    core: Core, keys: list[str] | str, partition_id: str, select_fields: list[str] | str | None = None
) -> TensorDict:
    """Fields of rows; default: all, and the rows must agree in which those are.

    Raises:
        StorageKeyNotFoundError: a row that is not there, or one without a field asked for; nothing partial is returned.
    """
    fields = None if select_fields is None else _list(select_fields)
    return await core.get_rows(_list(keys), partition_id, fields)


async def _kv_batch_get_by_meta(
    core: Core, meta: KVBatchMeta, select_fields: list[str] | str | None = None
) -> TensorDict:
    """Fields (default: `meta.fields`) of the rows of `meta`.

    Raises:
        BatchError: metadata without a partition.
        FieldNotFoundError: a field that the metadata does not have.
        StorageKeyNotFoundError: see kv_batch_get.
    """
    if meta.partition_id is None:
        raise BatchError("The metadata names no partition_id.")
    fields = meta.fields if select_fields is None else _list(select_fields)
    unknown = sorted(set(fields or ()) - set(meta.fields or ()))
    if unknown:
        raise FieldNotFoundError(f"Fields {unknown} are not in the metadata, which has {meta.fields}.")
    return await core.get_rows(meta.keys, meta.partition_id, fields)


async def _kv_list(core: Core, partition_id: str | None = None) -> dict[str, dict[str, Any]]:
    """partition -> key -> tags, of one partition or of all; a partition without rows is not listed."""
    return await core.kv_list(partition_id)


async def _kv_clear(core: Core, keys: list[str] | str, partition_id: str) -> None:
    """Remove rows; those that are gone already are no error."""
    await core.clear_keys(_list(keys), partition_id)


kv_put = _blocking(_kv_put)
kv_batch_put = _blocking(_kv_batch_put)
kv_batch_get = _blocking(_kv_batch_get)
kv_batch_get_by_meta = _blocking(_kv_batch_get_by_meta)
kv_list = _blocking(_kv_list)
kv_clear = _blocking(_kv_clear)
async_kv_put = _async(_kv_put)
async_kv_batch_put = _async(_kv_batch_put)
async_kv_batch_get = _async(_kv_batch_get)
async_kv_batch_get_by_meta = _async(_kv_batch_get_by_meta)
async_kv_list = _async(_kv_list)
async_kv_clear = _async(_kv_clear)


# ---------------------------------------------------------------------------------------------------------------- checkpoints
def save_checkpoint(
    checkpoint_dir: str | Path, *, include_storage: bool = True, metadata: dict[str, Any] | None = None
) -> None:
    """Write everything the plane holds to a folder; a folder that is there is replaced once the new one is whole.

    Args:
        checkpoint_dir: the folder.
        include_storage: as in 0.1.11; the columns, which are in memory, are always saved.
        metadata: facts of the caller's, kept in metadata.json.

    Raises:
        NotInitializedError: there is no plane; nothing is written.
        OutputError: the folder can't be written.
    """
    del include_storage
    client, target = get_client(), Path(checkpoint_dir)
    fresh = target.with_name(f"{target.name}.tmp")
    try:
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
        client.save_controller_checkpoint(str(fresh / checkpoint.ROWS_FILE))
        client.save_storage_checkpoint(str(fresh))
        saved = {"storage_saved": True, "user_metadata": metadata or {}}
        (fresh / _METADATA_FILE).write_text(json.dumps(saved, indent=2))
        _replace(target, fresh)
    except OSError as error:
        raise OutputError(f"The checkpoint {target} can't be written: {error}.") from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _replace(target: Path, fresh: Path) -> None:
    old = target.with_name(f"{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    fresh.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def load_checkpoint(checkpoint_dir: str | Path) -> None:
    """Make the plane hold what a checkpoint says, and nothing else. Row numbers (global_indexes) are new.

    Raises:
        NotInitializedError: there is no plane.
        FileNotFoundError: no checkpoint there.
        WireError: a file of it is damaged.
    """
    client, target = get_client(), Path(checkpoint_dir)
    old = target.with_name(f"{target.name}.old")
    if not target.exists() and old.exists():  # a save was cut short between its two renames
        old.rename(target)
    saved: Meta = json.loads((target / _METADATA_FILE).read_text())
    client.load_controller_checkpoint(str(target / checkpoint.ROWS_FILE))
    if saved.get("storage_saved"):
        client.load_storage_checkpoint(str(target))
