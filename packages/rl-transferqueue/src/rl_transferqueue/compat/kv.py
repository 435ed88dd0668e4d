"""The key-value functions of 0.1.11, blocking and `async_`, on this process's client."""

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

from rl_protocol.batch.kv_batch_meta import KVBatchMeta as Rows
from rl_protocol.errors import BatchError, OutputError
from rl_transferqueue.compat import checkpoint_files, rows_by_key
from rl_transferqueue.compat.errors import FieldNotFoundError
from rl_transferqueue.compat.lifecycle import get_client
from rl_transferqueue.compat.metadata.kv_batch_meta import KVBatchMeta, Meta
from rl_transferqueue.compat.msgpack_values import unpack_tag
from rl_transferqueue.compat.session import Session
from rl_transferqueue.compat.tensordicts import Parser, rows_in

P = ParamSpec("P")
T = TypeVar("T")
Method = Callable[Concatenate[Session, P], Coroutine[Any, Any, T]]

_METADATA_FILE = "metadata.json"


def _blocking(method: Method[P, T]) -> Callable[P, T]:
    """A function that runs the operation on this process's client and blocks until it is done."""

    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        client = get_client()
        return client.portal.run(method(client.session, *args, **kwargs))

    return cast("Callable[P, T]", _documented(call, method))


def _async(method: Method[P, T]) -> Callable[P, Coroutine[Any, Any, T]]:
    """A coroutine function that runs the operation on this process's client, from any loop."""

    async def call(*args: P.args, **kwargs: P.kwargs) -> T:
        client = get_client()
        return await client.on_any_loop(method)(client.session, *args, **kwargs)

    return cast("Callable[P, Coroutine[Any, Any, T]]", _documented(call, method))


def _documented(call: Any, method: Any) -> Any:
    """`call` with the name, docstring and signature of `method`, without its first parameter."""
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
    session: Session,
    key: str,
    partition_id: str,
    fields: TensorDict | dict[str, Any] | None = None,
    tag: dict[str, Any] | None = None,
    data_parser: Parser | None = None,
) -> KVBatchMeta:
    """Store fields and tags of one row.

    Args:
        session: the client's session.
        key: name of the row; an existing row gains the fields and tags.
        partition_id: the row's partition.
        fields: a dict of tensors (without a batch dimension) and other values, or a TensorDict of
            batch size [1].
        tag: values to tag the row with: numbers, strings, bools, None.
        data_parser: changes the fields (name to tensor or list) before they are stored, in place or
            by returning others; runs in this process.

    Returns:
        The row with all its fields and tags.

    Raises:
        BatchError: neither fields nor tag; nested tensors in a dict.
    """
    if fields is None and tag is None:
        raise BatchError("kv_put needs fields or a tag.")
    table = _one_row(fields) if isinstance(fields, dict) else fields
    return _described(
        await rows_by_key.put_rows(session, [key], partition_id, table, None if tag is None else [tag], data_parser)
    )


def _one_row(fields: dict[str, Any]) -> TensorDict:
    row: dict[str, object] = {}
    for name, value in fields.items():
        if isinstance(value, torch.Tensor) and value.is_nested:
            raise BatchError(f"Field {name!r} is a nested tensor; kv_put takes one row, use kv_batch_put.")
        row[name] = value.unsqueeze(0) if isinstance(value, torch.Tensor) else NonTensorStack(value)
    return TensorDict(row, batch_size=[1])


async def _kv_batch_put(
    session: Session,
    keys: list[str],
    partition_id: str,
    fields: TensorDict | None = None,
    tags: list[dict[str, Any]] | None = None,
    data_parser: Parser | None = None,
) -> KVBatchMeta:
    """Store fields and tags of N rows, all or nothing.

    Args:
        session: the client's session.
        keys: [N] names of the rows; existing rows gain the fields and tags.
        partition_id: the rows' partition.
        fields: a TensorDict of batch size [N].
        tags: [N] values to tag the rows with.
        data_parser: changes the fields (name to tensor or list) before they are stored, in place or
            by returning others; runs in this process.

    Returns:
        The rows with the fields that all of them have, and all their tags.

    Raises:
        BatchError: neither fields nor tags, or not one row per key.
        DuplicateKeyError: a key occurs twice.
    """
    if fields is None and tags is None:
        raise BatchError("kv_batch_put needs fields or tags.")
    if fields is not None and (rows := rows_in(fields)) != len(keys):
        raise BatchError(f"kv_batch_put needs one row per key: {len(keys)} keys, {rows} rows.")
    return _described(await rows_by_key.put_rows(session, keys, partition_id, fields, tags, data_parser))


async def _kv_batch_get(
    session: Session, keys: list[str] | str, partition_id: str, select_fields: list[str] | str | None = None
) -> TensorDict:
    """Fields of rows; default: those that all of the rows have.

    Raises:
        StorageKeyNotFoundError: a row, or a field of a row, is missing.
    """
    fields = None if select_fields is None else _list(select_fields)
    return await rows_by_key.get_rows(session, _list(keys), partition_id, fields)


async def _kv_batch_get_by_meta(
    session: Session, meta: KVBatchMeta, select_fields: list[str] | str | None = None
) -> TensorDict:
    """Fields (default: `meta.fields`) of the rows of `meta`.

    Raises:
        BatchError: the metadata has no partition.
        FieldNotFoundError: the metadata has no such field.
        StorageKeyNotFoundError: a row, or a field of a row, is missing.
    """
    if meta.partition_id is None:
        raise BatchError("The metadata names no partition_id.")
    fields = meta.fields if select_fields is None else _list(select_fields)
    unknown = sorted(set(fields or ()) - set(meta.fields or ()))
    if unknown:
        raise FieldNotFoundError(f"Fields {unknown} are not in the metadata, which has {meta.fields}.")
    return await rows_by_key.get_rows(session, meta.keys, meta.partition_id, fields)


async def _kv_list(session: Session, partition_id: str | None = None) -> dict[str, dict[str, Any]]:
    """Tags by partition and key, of one partition or of all; empty partitions are left out."""
    return await rows_by_key.kv_list(session, partition_id)


async def _kv_clear(session: Session, keys: list[str] | str, partition_id: str) -> None:
    """Remove rows; missing rows are ignored."""
    await rows_by_key.clear_keys(session, _list(keys), partition_id)


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


def save_checkpoint(
    checkpoint_dir: str | Path, *, include_storage: bool = True, metadata: dict[str, Any] | None = None
) -> None:
    """Write all rows of the plane to a folder, which replaces an existing one once it is complete.

    Args:
        checkpoint_dir: the folder.
        include_storage: ignored; the columns are in memory and always saved.
        metadata: the caller's metadata, kept in metadata.json.

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
        client.save_controller_checkpoint(str(fresh / checkpoint_files.ROWS_FILE))
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
    """Replace all rows of the plane by those of a checkpoint; they get new global_indexes.

    Raises:
        NotInitializedError: there is no plane.
        FileNotFoundError: the folder holds no checkpoint.
        WireError: a file of the checkpoint is damaged.
    """
    client, target = get_client(), Path(checkpoint_dir)
    old = target.with_name(f"{target.name}.old")
    if not target.exists() and old.exists():  # a save was interrupted between its two renames
        old.rename(target)
    saved: Meta = json.loads((target / _METADATA_FILE).read_text())
    client.load_controller_checkpoint(str(target / checkpoint_files.ROWS_FILE))
    if saved.get("storage_saved"):
        client.load_storage_checkpoint(str(target))
