"""Tensors read from a plane can be modified in place without effect on other readers.

The arenas are mapped read-only, torch has no read-only tensors, and a write to a read-only page
raises SIGSEGV. The test therefore runs its program in a separate process.
"""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import asyncio

import numpy as np
import torch
from tensordict import TensorDict

import rl_transferqueue.compat as tq
from rl_protocol import BatchData, dense, ragged
from rl_protocol.torch import tensor_from_column, to_tensor, to_tensordict
from rl_transferqueue import PlaneDescriptor, connect
from rl_transferqueue.consume.sampled_batches import DrawSettings
from rl_transferqueue.consume.samplers import Sequential
from rl_transferqueue.consume.streaming_dataset import StreamingDataset

ROWS, WIDTH = 4, 1 << 16
conf = tq.init({"rl_transferqueue": {"capacity_mb": 64, "segment_mb": 8}})
keys = [f"k{i}" for i in range(ROWS)]
client = tq.get_client()
jagged = torch.nested.as_nested_tensor([torch.full((i + 1,), 1.0) for i in range(ROWS)], layout=torch.jagged)
fields = {"score": torch.ones(ROWS), "wide": torch.ones(ROWS, WIDTH), "jagged": jagged}
tq.kv_batch_put(keys, "p", TensorDict(fields, batch_size=[ROWS]))
tq.kv_put("apart", "p", {"score": torch.tensor(1.0), "wide": torch.ones(WIDTH), "jagged": torch.ones(2)})


def write(td):
    td["score"] -= td["score"].mean() + 1
    for name in ("wide", "jagged"):
        tensor = td[name]
        (tensor.values() if tensor.is_nested else tensor).zero_()


def check(path):
    for some in (keys, keys[1:3], [keys[0], "apart"]):
        td = tq.kv_batch_get(some, "p")
        assert td["score"].tolist() == [1.0] * len(some), (path, td["score"])
        assert all(bool((row == 1).all()) for name in ("wide", "jagged") for row in td[name].unbind()), path
    print(path, flush=True)


for name, some in (("whole block", keys), ("part of a block", keys[1:3]), ("two blocks", [keys[0], "apart"])):
    write(tq.kv_batch_get(some, "p"))
    check(f"kv_batch_get, {name}")
write(asyncio.run(tq.async_kv_batch_get(keys, "p")))
check("async_kv_batch_get")
write(tq.kv_batch_get_by_meta(tq.KVBatchMeta(keys, [{}] * ROWS, "p", list(fields))))
check("kv_batch_get_by_meta")
write(client.get_data(client.kv_retrieve_meta(keys, "p")))
check("get_data")
dataset = tq.StreamingDataset(conf, ROWS, 2, list(fields), "p", "stream", 0)
write(next(iter(dataset))[0])
check("compat StreamingDataset")


async def native():
    async with await connect(PlaneDescriptor.from_json(conf.controller.zmq_info)) as plane:
        rows = (await plane.list_rows("p")).select_keys(keys)
        batch = await plane.get(rows, list(fields))
        write(to_tensordict(batch))
        tensor_from_column(batch["wide"]).values().zero_()
        to_tensor(batch["score"].values, "float32").zero_()
        await plane.put("n", keys, BatchData({"x": dense(np.ones((ROWS, 8)))}))
        again = await plane.get(rows, list(fields))
        assert again.dense("score").values.tolist() == [1.0] * ROWS


asyncio.run(native())
check("rl_protocol.torch")
descriptor = PlaneDescriptor.from_json(conf.controller.zmq_info)
draws = DrawSettings(partition="n", task="t", count=2, fields=("x",), timeout_s=30)
streamed = StreamingDataset(descriptor, Sequential(), draws, turns=1)
for data, _ in streamed:
    data["x"].zero_()
assert bool((tq.kv_batch_get(keys, "n")["x"] == 1).all())
check("native StreamingDataset")
tq.close()
"""
PATHS = [
    "kv_batch_get, whole block",
    "kv_batch_get, part of a block",
    "kv_batch_get, two blocks",
    "async_kv_batch_get",
    "kv_batch_get_by_meta",
    "get_data",
    "compat StreamingDataset",
    "rl_protocol.torch",
    "native StreamingDataset",
]


def test_a_write_in_place_survives_and_no_other_reader_sees_it() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout.splitlines()) == (0, PATHS), done.stderr
