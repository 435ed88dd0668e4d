"""User code of TransferQueue 0.1.11, as functions that take the imported module as `tq`.

Each function returns what the user would see, as plain data.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tensordict import NonTensorStack, TensorDict


def plain(value: Any) -> Any:
    """Convert a tensor to a dict with a nested list per row, and a stack to a list."""
    if isinstance(value, torch.Tensor):
        rows = value.unbind() if value.is_nested else list(value)
        return {"dtype": str(value.dtype), "jagged": bool(value.is_nested), "rows": [row.tolist() for row in rows]}
    return [item.tolist() if isinstance(item, torch.Tensor) else item for item in value.tolist()]


def rows_of(data: TensorDict, name: str) -> list[Any]:
    """Return the rows of one column in ascending order.

    0.1.11 reuses the numbers of cleared rows, so the order of its rows can vary.
    """
    return sorted(plain(data.get(name))["rows"])


def table(data: TensorDict) -> dict[str, Any]:
    return {str(name): plain(data.get(name)) for name in sorted(map(str, data.keys()))}


def batch(rows: range) -> TensorDict:
    """Return a batch with dense, jagged, scalar, bf16, bool and text columns."""
    jagged = torch.nested.nested_tensor([torch.arange(i % 3 + 1) for i in rows], layout=torch.jagged)
    return TensorDict(
        {
            "ids": torch.arange(2 * len(rows)).reshape(len(rows), 2) + 10 * rows[0],
            "jag": jagged,
            "num": torch.tensor([float(i) for i in rows]),
            "half": torch.ones(len(rows), 3, dtype=torch.bfloat16) * 0.5,
            "mask": torch.tensor([[i % 2 == 0, True] for i in rows]),
            "text": NonTensorStack(*[f"row {i}" for i in rows]),
        },
        batch_size=[len(rows)],
    )


def keys(rows: range) -> list[str]:
    return [f"k{i}" for i in rows]


# --------------------------------------------------------------------------------
# Key-value API
def put_and_get_one(tq: Any) -> Any:
    meta = tq.kv_put("a", "p", {"x": torch.tensor([1, 2, 3]), "name": "hello"}, {"score": 0.5})
    again = tq.kv_put("a", "p", {"y": torch.tensor([2.5])}, {"step": 3})
    got = tq.kv_batch_get("a", "p")
    return [meta.keys, meta.tags, sorted(meta.fields), again.tags, sorted(again.fields), table(got)]


def put_and_get_many(tq: Any) -> Any:
    meta = tq.kv_batch_put(keys(range(5)), "p", batch(range(5)), [{"n": i} for i in range(5)])
    some = tq.kv_batch_get(["k3", "k0"], "p", ["ids", "text", "jag"])
    by_meta = tq.kv_batch_get_by_meta(meta.select_keys(["k1"]), "num")
    return [
        meta.partition_id,
        meta.size,
        sorted(meta.fields),
        table(tq.kv_batch_get(keys(range(5)), "p")),
        table(some),
        table(by_meta),
    ]


def puts_of_different_lengths_read_together(tq: Any) -> Any:
    tq.kv_put("a", "p", {"x": torch.tensor([1, 2, 3])})
    tq.kv_put("b", "p", {"x": torch.tensor([4])})
    return table(tq.kv_batch_get(["b", "a"], "p"))


def columns_arrive_later(tq: Any) -> Any:
    meta = tq.kv_batch_put(keys(range(3)), "p", batch(range(3)))
    more = TensorDict({"adv": torch.tensor([[1.0], [2.0], [3.0]])}, batch_size=[3])
    later = tq.kv_batch_put(keys(range(3)), "p", more, [{"done": True}] * 3)
    return [sorted(meta.fields), sorted(later.fields), table(tq.kv_batch_get(keys(range(3)), "p", "adv"))]


def tags_alone(tq: Any) -> Any:
    first = tq.kv_put("uid", "p", tag={"status": "pending"})
    second = tq.kv_put("uid", "p", tag={"status": "running", "step": 2})
    return [first.tags, first.fields, second.tags, tq.kv_list("p"), tq.kv_list("nowhere")]


def listing_and_clearing(tq: Any) -> Any:
    tq.kv_batch_put(keys(range(4)), "p", batch(range(4)), [{"n": i} for i in range(4)])
    tq.kv_put("v", "val", tag={"m": 1})
    before = tq.kv_list()
    tq.kv_clear(["k0", "k2"], "p")
    tq.kv_clear(["k0"], "p")
    tq.kv_clear("v", "val")
    after = tq.kv_list("p")
    return [before, after]


def objects_of_all_kinds(tq: Any) -> Any:
    rows = [{"a": [1, 2.5, None]}, ("t", 1), "text", 7]  # the tuple becomes a list
    tq.kv_batch_put(keys(range(4)), "p", TensorDict({"o": NonTensorStack(*rows)}, batch_size=[4]))
    got = tq.kv_batch_get(keys(range(4)), "p").get("o").tolist()
    return [[type(value).__name__, value] for value in got]


def a_parser_changes_what_is_put(tq: Any) -> Any:
    def parser(fields: dict[str, Any]) -> dict[str, Any]:
        fields["url"] = [f"<{value}>" for value in fields["url"]]
        return fields

    data = TensorDict({"url": NonTensorStack("a", "b"), "n": torch.tensor([1, 2])}, batch_size=[2])
    tq.kv_batch_put(["a", "b"], "p", data, data_parser=parser)
    return table(tq.kv_batch_get(["a", "b"], "p"))


def the_async_twins(tq: Any) -> Any:
    async def main() -> Any:
        meta = await tq.async_kv_batch_put(keys(range(2)), "p", batch(range(2)), [{"n": 1}, {"n": 2}])
        one = await tq.async_kv_put("k9", "p", batch(range(9, 10)), {"n": 9})
        got = await tq.async_kv_batch_get(["k9", "k0"], "p", "num")
        by_meta = await tq.async_kv_batch_get_by_meta(meta, ["num", "text"])
        listed = await tq.async_kv_list("p")
        await tq.async_kv_clear("k9", "p")
        return [one.keys, one.tags, table(got), table(by_meta), listed, await tq.async_kv_list("p")]

    return asyncio.run(main())


def mistakes_with_keys(tq: Any) -> Any:
    tq.kv_batch_put(["a", "b"], "p", TensorDict({"x": torch.ones(2, 1)}, batch_size=[2]))
    seen: list[str] = []

    def attempt(what: str, kinds: type[BaseException] | tuple[type[BaseException], ...], call: Any) -> None:
        try:
            call()
        except kinds:
            seen.append(what)

    attempt("nothing to put", ValueError, lambda: tq.kv_put("a", "p"))
    attempt("nothing to put, batch", ValueError, lambda: tq.kv_batch_put(["a"], "p"))
    attempt("rows and keys differ", ValueError, lambda: tq.kv_batch_put(["a"], "p", batch(range(2))))
    attempt("tags and keys differ", ValueError, lambda: tq.kv_batch_put(["a", "b"], "p", tags=[{}]))
    attempt("no such key", ValueError, lambda: tq.kv_batch_get(["ghost"], "p"))
    attempt("no such partition", ValueError, lambda: tq.kv_batch_get(["a"], "nowhere"))
    meta = tq.kv_put("a", "p", tag={"n": 1})
    attempt("field not in the metadata", ValueError, lambda: tq.kv_batch_get_by_meta(meta, "never"))
    attempt("select_keys", RuntimeError, lambda: meta.select_keys(["ghost"]))
    return seen


# --------------------------------------------------------------------------------
# Metadata API, with row numbers
def put_fetch_consume(tq: Any) -> Any:
    client = tq.get_client()
    meta = client.put(batch(range(6)), partition_id="p")
    first = client.get_meta(["ids", "num"], 4, "p", task_name="train")
    data = client.get_data(first)
    partly = client.get_consumption_status("train", "p")[1].tolist()
    second = client.get_meta(["num"], 2, "p", task_name="train")
    other = client.get_meta(["num"], 6, "p", task_name="score")
    done = client.check_consumption_status("train", "p")
    reset = client.reset_consumption("p", "train")
    again = client.get_meta(["num"], 6, "p", task_name="train")
    return [
        [meta.size, meta.field_names, meta.is_ready],
        [first.size, first.field_names, first.is_ready, first.partition_ids],
        [sorted(data.keys()), sorted(partly), plain(data.get("ids"))["jagged"]],
        sorted([*rows_of(data, "num"), *rows_of(client.get_data(second), "num")]),
        other.size,
        [done, reset, again.size],
    ]


def stage_after_stage(tq: Any) -> Any:
    client = tq.get_client()
    client.put(TensorDict({"prompt": torch.arange(4).reshape(4, 1)}, batch_size=[4]), partition_id="p")
    meta = client.get_meta(["prompt"], 4, "p", task_name="generate")
    ready_before = client.check_production_status(["prompt", "response"], "p")
    prompts = client.get_data(meta)
    response = torch.stack([row * 10 for row in prompts.get("prompt").unbind()])
    meta.update_custom_meta([{"len": i} for i in range(4)])
    out = client.put(TensorDict({"response": response}, batch_size=[4]), meta)
    later = client.get_meta(["prompt", "response"], 4, "p", task_name="train")
    status = client.get_production_status(["prompt", "response"], "p")[1].tolist()
    return [
        ready_before,
        out.field_names,
        table(client.get_data(later)),
        later.get_all_custom_meta(),
        status,
        client.check_production_status(["prompt", "response"], "p"),
        client.get_production_status(["never"], "p"),
        client.get_consumption_status("t", "nowhere"),
    ]


def metadata_is_taken_apart_and_put_together(tq: Any) -> Any:
    client = tq.get_client()
    meta = client.put(batch(range(5)), partition_id="p")
    meta.set_extra_info("temperature", 0.5)
    parts = meta.chunk(3)
    whole = tq.BatchMeta.concat(parts)
    few = meta.select_samples([4, 0]).select_fields(["num", "text"])
    whole.reorder([4, 3, 2, 1, 0])
    union = meta.select_fields(["num"]).union(meta.select_fields(["text"]))
    return [
        [part.size for part in parts],
        [whole.size, whole.field_names, whole.get_extra_info("temperature")],
        table(client.get_data(few)),
        table(client.get_data(whole.select_fields(["num"]))),
        table(client.get_data(union)),
        [len(meta[1:3]), len(meta[-1]), [list(shape) for shape in meta.get_shapes("jag")]],
        [str(dtype) for dtype in meta.get_dtypes("half")],
        [sample.partition_id for sample in meta.samples],
        list(meta.samples[1].fields["jag"]["shape"]),
    ]


def keys_and_numbers(tq: Any) -> Any:
    client = tq.get_client()
    tq.kv_batch_put(["a", "b", "c"], "p", batch(range(3)), [{"n": 1}, {"n": 2}, {"n": 3}])
    meta = client.kv_retrieve_meta(["c", "a"], "p")
    made = client.kv_retrieve_meta(["new", "a"], "p", create=True)
    names = client.kv_retrieve_keys(meta.global_indexes, "p")
    data = client.get_data(meta.select_fields(["num"]))
    return [meta.size, meta.field_names, meta.get_all_custom_meta(), made.size, made.field_names, names, table(data)]


def clearing_by_metadata(tq: Any) -> Any:
    client = tq.get_client()
    meta = client.put(batch(range(4)), partition_id="p")
    client.put(batch(range(2)), partition_id="q")
    client.clear_samples(meta.select_samples([0, 3]))
    left = client.get_meta(["num"], 2, "p", task_name="t")
    client.clear_partition("q")
    return [rows_of(client.get_data(left), "num"), client.check_consumption_status("t", "p")]


def whole_groups(tq: Any) -> Any:
    sampler = tq.GRPOGroupNSampler(n_samples_per_prompt=2)
    balanced = tq.SeqlenBalancedSampler(n_samples_per_prompt=1, dp_size=2)
    ranked = tq.RankAwareSampler()
    asks = [ranked.sample([5, 6, 7, 8], 2, dp_rank=r, batch_index=0, task_name="t", partition_id="p") for r in (0, 0)]
    told = {"dp_rank": 0, "batch_index": 0}
    return [
        sampler.sample([0, 2, 3, 5, 6, 7], 4),
        sampler.sample([0, 2, 3, 5, 7], 4),
        tq.SequentialSampler().sample([3, 4, 5], 2),
        [list(ask) for ask in asks],
        [len(share) for share in balanced.sample([1, 2, 3, 4], 2, task_name="t", partition_id="p", **told)],
    ]


def kv_metadata(tq: Any) -> Any:
    meta = tq.KVBatchMeta(["a", "b", "c"], [{"n": 1}, {"n": 2}, {"n": 3}], "p", ["x"], {"t": 1})
    parts = meta.chunk(2)
    whole = tq.KVBatchMeta.concat(parts)
    whole.reorder([2, 0, 1])
    return [[p.keys for p in parts], whole.keys, whole.tags, whole.extra_info, meta.select_keys(["b"]).tags, len(meta)]


def checkpoints(tq: Any, folder: Path) -> Any:
    client = tq.get_client()
    tq.kv_batch_put(keys(range(4)), "p", batch(range(4)), [{"n": i} for i in range(4)])
    first = rows_of(client.get_data(client.get_meta(["num"], 2, "p", task_name="train")), "num")
    tq.save_checkpoint(folder / "ckpt", metadata={"step": 7})
    tq.kv_clear(keys(range(4)), "p")
    tq.load_checkpoint(folder / "ckpt")
    left = client.get_meta(["num"], 2, "p", task_name="train")
    both = sorted([*first, *rows_of(client.get_data(left), "num")])
    return [tq.kv_list("p"), table(tq.kv_batch_get(keys(range(4)), "p")), both]


SCENARIOS = [
    put_and_get_one,
    put_and_get_many,
    puts_of_different_lengths_read_together,
    columns_arrive_later,
    tags_alone,
    listing_and_clearing,
    objects_of_all_kinds,
    a_parser_changes_what_is_put,
    the_async_twins,
    mistakes_with_keys,
    put_fetch_consume,
    stage_after_stage,
    metadata_is_taken_apart_and_put_together,
    keys_and_numbers,
    clearing_by_metadata,
    whole_groups,
    kv_metadata,
    checkpoints,
]


def play(scenario: Callable[..., Any], tq: Any, folder: Path) -> Any:
    """Return the result of one scenario; `folder` is for scenarios that write files."""
    return scenario(tq, folder) if scenario is checkpoints else scenario(tq)


def run(tq: Any, folder: Path) -> dict[str, Any]:
    """Run every scenario on an empty plane and return the results by name."""
    results: dict[str, Any] = {}
    for scenario in SCENARIOS:
        client = tq.get_client()
        for partition in client.get_partition_list():
            client.clear_partition(partition)
        results[scenario.__name__] = play(scenario, tq, folder)
    return results


def signatures(tq: Any) -> dict[str, list[str]]:
    """Return the argument names of each public call; "=" marks an argument with a default."""

    def arguments(call: Any) -> list[str]:
        parameters = inspect.signature(call).parameters.values()
        return [p.name + ("=" if p.default is not p.empty else "") for p in parameters if p.name != "self"]

    out = {name: arguments(getattr(tq, name)) for name in FUNCTIONS}
    client = tq.get_client()
    out |= {f"client.{name}": arguments(getattr(client, name)) for name in CLIENT_METHODS}
    for kind, methods in METHODS.items():
        out[kind] = arguments(getattr(tq, kind).__init__)
        out |= {f"{kind}.{name}": arguments(getattr(getattr(tq, kind), name)) for name in methods}
    return out


_KV = ["kv_put", "kv_batch_put", "kv_batch_get", "kv_batch_get_by_meta", "kv_list", "kv_clear"]
FUNCTIONS = [
    "init",
    "close",
    "get_client",
    "get_metrics_endpoint",
    "save_checkpoint",
    "load_checkpoint",
    *_KV,
    *[f"async_{name}" for name in _KV],
]
_CLIENT = [
    "get_meta",
    "set_custom_meta",
    "put",
    "get_data",
    "clear_partition",
    "clear_samples",
    "get_consumption_status",
    "get_production_status",
    "check_consumption_status",
    "check_production_status",
    "reset_consumption",
    "get_partition_list",
    "kv_retrieve_meta",
    "kv_retrieve_keys",
    "kv_list",
    "save_controller_checkpoint",
    "load_controller_checkpoint",
    "save_storage_checkpoint",
    "load_storage_checkpoint",
]
CLIENT_METHODS = [*_CLIENT, "close"]
METHODS = {
    "TransferQueueClient": [],
    "KVBatchMeta": ["select_keys", "reorder", "chunk", "concat"],
    "BatchMeta": [
        "get_dtypes", "get_shapes", "get_extra_info", "set_extra_info", "get_all_extra_info", "update_extra_info", "remove_extra_info",
        "clear_extra_info", "has_extra_info", "get_all_custom_meta", "update_custom_meta", "clear_custom_meta", "add_fields", "select_samples",
        "select_fields", "copy", "chunk", "chunk_by_partition", "union", "concat", "reorder", "empty",
    ],
    "BaseSampler": ["has_cached_result", "clear_cache", "save_checkpoint", "load_checkpoint"],
    "SequentialSampler": [],
    "RankAwareSampler": [],
    "GRPOGroupNSampler": [],
    "SeqlenBalancedSampler": [],
    "StreamingDataset": ["reset", "step"],
    "StreamingDataLoader": ["reset", "step", "get_buffer"],
}  # fmt: skip
