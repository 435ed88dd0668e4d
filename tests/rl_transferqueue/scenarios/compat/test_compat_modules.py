"""The compatible API: module names, replaced methods, samplers, deadlines, and checkpoints."""

from __future__ import annotations

import importlib
import importlib.util
import os
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import in_a_fork
from tensordict import NonTensorStack, TensorDict

import rl_transferqueue.compat as tq
from rl_protocol import BatchError, PlaneTimeout, SchemaError
from rl_transferqueue.compat import lifecycle
from rl_transferqueue.compat.sampler.seqlen_balanced_sampler import get_seqlen_balanced_partitions

SMALL = {"rl_transferqueue": {"capacity_mb": 32, "segment_mb": 1}}


@pytest.fixture
def plane() -> Iterator[tq.TransferQueueClient]:
    tq.close()
    tq.init(SMALL)
    yield tq.get_client()
    tq.close()


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("client", ["TransferQueueClient", "AsyncTransferQueueClient"]),
        ("metadata", ["BatchMeta", "KVBatchMeta"]),
        (
            "sampler",
            ["BaseSampler", "SequentialSampler", "GRPOGroupNSampler", "RankAwareSampler", "SeqlenBalancedSampler"],
        ),
        ("sampler.base", ["BaseSampler"]),
        ("sampler.sequential_sampler", ["SequentialSampler"]),
        ("sampler.grpo_group_n_sampler", ["GRPOGroupNSampler"]),
        ("sampler.rank_aware_sampler", ["RankAwareSampler"]),
        (
            "sampler.seqlen_balanced_sampler",
            ["SeqlenBalancedSampler", "get_seqlen_balanced_partitions", "karmarkar_karp"],
        ),
        ("dataloader", ["StreamingDataset", "StreamingDataLoader"]),
        ("dataloader.streaming_dataset", ["StreamingDataset", "chunk_batch_fn", "default_fetch_batch_fn"]),
        ("dataloader.streaming_dataloader", ["StreamingDataLoader"]),
    ],
)
def test_names_are_importable_from_the_modules_of_0_1_11(module: str, names: list[str]) -> None:
    ours = importlib.import_module(f"rl_transferqueue.compat.{module}")
    assert [name for name in names if not hasattr(ours, name)] == []
    if importlib.util.find_spec("transfer_queue") is not None:
        theirs = importlib.import_module(f"transfer_queue.{module}")
        assert [name for name in names if not hasattr(theirs, name)] == []


def test_a_method_replaced_on_the_class_is_the_one_that_is_called(
    plane: tq.TransferQueueClient, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Counting(tq.TransferQueueClient):
        puts = 0

        def put(self, *args: Any, **kwargs: Any) -> Any:
            self.puts += 1
            return super().put(*args, **kwargs)

    mine = Counting("mine", plane.descriptor)
    mine.put(TensorDict({"x": torch.arange(2)}, batch_size=[2]), partition_id="p")
    assert (mine.puts, mine.get_partition_list()) == (1, ["p"])
    mine.close()

    def fails(self: tq.TransferQueueClient, folder: str) -> None:
        raise RuntimeError(f"no room in {Path(folder).name}")

    monkeypatch.setattr(tq.TransferQueueClient, "save_storage_checkpoint", fails)
    with pytest.raises(RuntimeError, match=r"no room in c\.tmp"):
        tq.save_checkpoint(tmp_path / "c")
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_without_a_plane_writes_nothing(tmp_path: Path) -> None:
    tq.close()
    with pytest.raises(tq.NotInitializedError):
        tq.save_checkpoint(tmp_path / "c")
    with pytest.raises(tq.NotInitializedError):
        tq.load_checkpoint(tmp_path / "c")
    assert list(tmp_path.iterdir()) == []


def test_init_gives_up_on_a_plane_that_does_not_answer(
    plane: tq.TransferQueueClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit is rl_transferqueue.timeout_s, whether or not this process has a client already."""
    impatient = {"rl_transferqueue": SMALL["rl_transferqueue"] | {"timeout_s": 0.5}}
    controller = plane.descriptor.controller.process.pid
    os.kill(controller, signal.SIGSTOP)
    try:
        with pytest.raises(PlaneTimeout):
            tq.init(impatient)
        with monkeypatch.context() as patch:
            patch.setattr(lifecycle, "_processes", {})  # as in a new process
            with pytest.raises(PlaneTimeout):
                tq.init(impatient)
    finally:
        os.kill(controller, signal.SIGCONT)
    tq.init(SMALL)
    assert tq.get_client() is plane


@pytest.mark.filterwarnings("ignore:.*fork.*")
def test_a_fork_during_init_does_not_wait_for_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(lifecycle.PLANE_VARIABLE, raising=False)
    starts, ends = threading.Event(), threading.Event()

    def start(*_: object) -> None:
        starts.set()
        assert ends.wait(60)
        raise PlaneTimeout("enough")

    def init() -> None:
        with pytest.raises(PlaneTimeout, match="enough"):
            tq.init()

    monkeypatch.setattr(lifecycle, "_start", start)
    thread = threading.Thread(target=init)
    thread.start()
    try:
        assert starts.wait(60)
        assert in_a_fork(tq.get_client).startswith("NotInitializedError: There is no plane")
    finally:
        ends.set()
        thread.join(60)


def test_rows_are_numbered_from_0(plane: tq.TransferQueueClient) -> None:
    """User code indexes arrays with `global_indexes`, as tutorial 05 of 0.1.11 does."""
    assert plane.put(TensorDict({"x": torch.arange(3)}, batch_size=[3]), partition_id="p").global_indexes == [0, 1, 2]
    meta = plane.get_meta(["x"], 2, "p", task_name="t")
    assert (meta.global_indexes, plane.get_data(meta)["x"].tolist()) == ([0, 1], [0, 1])
    (named,) = plane.kv_retrieve_meta("a", "p", create=True).global_indexes
    assert (named > 2, plane.kv_retrieve_keys(named, "p")) == (True, ["a"])


# --------------------------------------------------------------------------------
# Samplers
def test_the_sequential_sampler_returns_what_there_is() -> None:
    sampler = tq.SequentialSampler()
    assert sampler.sample([4, 5], 5) == ([4, 5], [4, 5])
    assert sampler.sample([4, 5, 6], 2) == ([4, 5], [4, 5])
    assert sampler.sample([], 2) == ([], [])


def test_lengths_are_partitioned_by_the_differencing_method() -> None:
    """Computed by hand: 8 - 7 = 1, 6 - 5 = 1, 4 - 1 = 3, 3 - 1 = 2, so the sums are 16 and 14."""
    assert get_seqlen_balanced_partitions([8, 7, 6, 5, 4], 2, equal_size=False) == [[1, 3, 4], [0, 2]]
    assert get_seqlen_balanced_partitions([100, 100, 10, 10], 2, equal_size=True) == [[1, 2], [0, 3]]
    for lengths, parts in (([10, 20, 30], 2), ([10], 3)):
        with pytest.raises(AssertionError):  # as in 0.1.11
            get_seqlen_balanced_partitions(lengths, parts, equal_size=True)


@pytest.mark.skipif(importlib.util.find_spec("transfer_queue") is None, reason="uv sync --group bench")
def test_partitions_are_those_of_the_package() -> None:
    from transfer_queue.sampler.seqlen_balanced_sampler import get_seqlen_balanced_partitions as theirs

    random_ = random.Random(0)
    for _ in range(300):
        parts = random_.randint(1, 6)
        lengths = [random_.randint(0, random_.choice([1, 5, 1000])) for _ in range(parts * random_.randint(1, 8))]
        assert get_seqlen_balanced_partitions(lengths, parts, True) == theirs(lengths, parts, True)


def test_a_rank_beyond_the_last_is_named(plane: tq.TransferQueueClient) -> None:
    tq.close()
    tq.init(SMALL | {"controller": {"sampler": tq.SeqlenBalancedSampler(dp_size=2), "fetch_timeout_s": 0.2}})
    with pytest.raises(BatchError, match=r"dp_rank 2 .*\[0, 1\]"):
        tq.get_client().get_meta(["x"], 1, "p", task_name="t", sampling_config={"dp_rank": 2, "batch_index": 0})


def test_micro_batches_of_a_dense_field_are_dense() -> None:
    fields = {"dense": torch.arange(6).reshape(3, 2), "text": ["a", "b", "c"]}
    fields["jagged"] = torch.nested.as_nested_tensor([torch.ones(i + 1) for i in range(3)], layout=torch.jagged)
    meta = tq.BatchMeta([0, 1, 2], ["p"] * 3)
    chunk_batch_fn = importlib.import_module("rl_transferqueue.compat.dataloader.streaming_dataset").chunk_batch_fn
    parts = chunk_batch_fn(TensorDict(fields, batch_size=[3]), meta, 2)
    assert [part["dense"].tolist() for part, _ in parts] == [[[0, 1], [2, 3]], [[4, 5]]]
    assert [[len(row) for row in part["jagged"].unbind()] for part, _ in parts] == [[1, 2], [3]]
    assert [part.get("text").tolist() for part, _ in parts] == [["a", "b"], ["c"]]
    assert [rows.global_indexes for _, rows in parts] == [[0, 1], [2]]


def test_a_put_of_new_rows_that_fails_leaves_none(plane: tq.TransferQueueClient) -> None:
    good = plane.put(TensorDict({"x": torch.ones(2)}, batch_size=[2]), partition_id="p")
    assert plane.get_data(good)["x"].tolist() == [1.0, 1.0]
    bad = {
        "a type that can't be stored": (TensorDict({"x": NonTensorStack(len)}, batch_size=[1]), SchemaError),
        "more than a unit": (TensorDict({"x": torch.ones(1, 64 << 20, dtype=torch.uint8)}, batch_size=[1]), BatchError),
        "no rows": (TensorDict({"x": torch.ones(0)}, batch_size=[0]), BatchError),
        "no batch size": (TensorDict({"x": torch.ones(1)}, batch_size=[]), BatchError),
    }
    for what, (data, error) in bad.items():
        with pytest.raises(error):
            plane.put(data, partition_id="p")
        assert plane.get_meta(["x"], 1, "p", mode="force_fetch").size == 2, what


def test_wrong_numbers_and_values_are_named(plane: tq.TransferQueueClient) -> None:
    with pytest.raises(BatchError, match="got batch_size=-1"):
        plane.get_meta(["x"], -1, "p", mode="insert")
    with pytest.raises(BatchError, match=r"batch size .* got \[\]"):
        tq.kv_batch_put(["a"], "p", TensorDict({"x": torch.ones(1)}, batch_size=[]))
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(SchemaError, match="Field 'x', row 0: a value nested this deeply"):
        tq.kv_put("a", "p", {"x": deep})
    assert tq.kv_list("p") == {}
