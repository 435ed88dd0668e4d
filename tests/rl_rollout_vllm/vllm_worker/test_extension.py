"""Worker methods over a fake model: what they read, hold and refuse."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from rl_protocol import WeightTensor
from rl_rollout_vllm.vllm_worker.extension import WorkerExtension
from rl_rollout_vllm.weights.buckets import Buckets


def weight(name, count=4, dtype="float32"):
    size = {"float32": 4, "bfloat16": 2, "int32": 4}[dtype]
    return WeightTensor(name, dtype, (count,), np.arange(count * size, dtype=np.uint8))


@pytest.fixture
def buckets():
    made = Buckets(256)
    yield made
    made.close()


class Worker(WorkerExtension):
    """WorkerExtension over a model that keeps the last tensor of every bucket."""

    def __init__(self):
        self.model_runner = self
        self.loaded, self.kept, self.configured = {}, None, False

    @contextmanager
    def rollout_configured(self):
        self.configured = True
        yield
        self.configured = False

    def get_model(self):
        return self

    def load_weights(self, tensors):
        assert self.configured, "layers find vLLM's configuration"
        for name, tensor in tensors:
            self.loaded[name] = tensor.tolist()
            self.kept = tensor


def load(worker, bucket):
    return worker.rollout_load_bucket(bucket.path, bucket.entries, bucket.digest)


def test_a_worker_reports_what_it_read_and_what_it_holds(buckets, memory_of_buckets):
    worker = Worker()
    for values in ([1.0, 2.0], [3.0, -4.0]):  # the second load reuses the mapping
        data = np.array(values, np.float32).view(np.uint8)
        bucket = buckets.fill([WeightTensor("a", "float32", (2,), data), weight("b", 3, "bfloat16")])
        assert load(worker, bucket) == (bucket.digest, [bucket.inode])
        assert worker.loaded["a"] == values
        worker.kept = None
        assert worker.rollout_buckets.held() == []
        buckets.answered(bucket, [])
    assert memory_of_buckets() == 1
    buckets.close()
    assert memory_of_buckets() == 1
    worker.rollout_forget_buckets()
    assert memory_of_buckets() == 0


def test_a_worker_detects_a_changed_bucket_and_loads_no_adapter_from_it(buckets, monkeypatch):
    worker, bucket = Worker(), buckets.fill([weight("a"), weight("b")])
    with Path(bucket.path).open("r+b") as file:
        file.write(b"\xff")
    held = []
    monkeypatch.setattr(worker, "_rollout_hold_adapter", lambda *adapter: held.append(adapter))
    read, _ = worker.rollout_load_adapter(bucket.path, bucket.entries, bucket.digest, 1, "{}")
    assert load(worker, bucket)[0] == read != bucket.digest
    assert held == []
    whole = buckets.fill([weight("a")])
    assert worker.rollout_load_adapter(whole.path, whole.entries, whole.digest, 1, "{}")[0] == whole.digest
    assert len(held) == 1


def test_writes_of_a_worker_stay_private_and_are_detected(buckets):
    worker, bucket = Worker(), buckets.fill([weight("a")])
    load(worker, bucket)
    worker.kept.zero_()
    assert Path(bucket.path).read_bytes()[:16] == weight("a").data.tobytes()
    worker.kept = None
    buckets.answered(bucket, [])
    again = buckets.fill([weight("a")])
    assert load(worker, again)[0] != again.digest
    worker.kept = None
    assert worker.rollout_buckets.held() == []
    assert load(worker, again)[0] == again.digest  # through a new mapping
