"""What an engine reads of a checkpoint folder, and how weights are checked, split and laid into shared memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_protocol import ConfigError, WeightSyncError, WeightTensor
from rl_rollout_vllm.buckets import Buckets, checked, split
from rl_rollout_vllm.checkpoint import Checkpoint, read_checkpoint, read_tensors, require_shards
from rl_rollout_vllm.config import VLLMConfig, environment
from rl_rollout_vllm.worker import WeightUpdates


def weight(name, count=4, dtype="float32"):
    size = {"float32": 4, "bfloat16": 2, "int32": 4}[dtype]
    return WeightTensor(name, dtype, (count,), np.arange(count * size, dtype=np.uint8))


def model(tied=False, **shapes):
    return Checkpoint(path=Path("m"), context=8, vocabulary=8, eos_ids=(1,), head_size=64, tied=tied, shapes=shapes)


def test_what_a_folder_says(checkpoint):
    found = read_checkpoint(checkpoint)
    assert (found.context, found.vocabulary, found.eos_ids, found.tied) == (64, 8, (1,), False)
    assert found.shapes == {"table.low": (4, 8), "table.high": (4, 8)}
    assert [w.name for w in read_tensors(checkpoint / "model.safetensors")] == ["table.low", "table.high"]


def test_generation_settings_come_before_the_models_and_several_stop_tokens_count(checkpoint, tmp_path):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((checkpoint / name).read_bytes())
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 5]}))
    assert read_checkpoint(tmp_path).eos_ids == (3, 5)


@pytest.mark.parametrize(
    ("heads", "shared", "size", "fits"),
    [(4, 4, 2, True), (4, 1, 2, True), (4, 2, 4, True), (4, 4, 3, False), (12, 4, 6, False), (12, 4, 12, True)],
)
def test_every_process_that_shares_a_layer_has_whole_heads(heads, shared, size, fits):
    described = {"num_attention_heads": heads, "num_key_value_heads": shared}
    if fits:
        require_shards(described, size)
    else:
        with pytest.raises(ConfigError, match=rf"{heads} attention heads and {shared} .* {size} processes"):
            require_shards(described, size)


@pytest.mark.parametrize("content", [b"", b"\xff" * 20, (5).to_bytes(8, "little") + b"hello"])
def test_a_damaged_file_is_named(checkpoint, tmp_path, content):
    (tmp_path / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=r"model\.safetensors can't be read as a safetensors file"):
        read_checkpoint(tmp_path)


def test_a_tied_head_that_is_left_out_is_added():
    """Pitfall: vLLM on CPU keeps a prepacked head, which stays old, silently, unless lm_head.weight is sent."""
    tied = model(tied=True, **{"model.embed_tokens.weight": (4,)})
    embedding = weight("model.embed_tokens.weight")
    sent = checked([embedding], tied, 1)
    assert [w.name for w in sent] == ["model.embed_tokens.weight", "lm_head.weight"]
    assert sent[1].data.tobytes() == embedding.data.tobytes()
    assert len(checked(sent, tied, 1)) == 2
    with pytest.raises(WeightSyncError, match="unknown"):
        checked(sent, model(**{"model.embed_tokens.weight": (4,)}), 1)


def test_a_tied_head_whose_embedding_is_not_known_is_refused():
    with pytest.raises(WeightSyncError, match="ties its head to an embedding that is not called"):
        checked([weight("wte")], model(tied=True, wte=(4,)), 1)


def test_integers_are_no_weights():
    with pytest.raises(WeightSyncError, match=r"'a' of version 2 is int32 \(4,\).*float32"):
        checked([weight("a", dtype="int32")], model(a=(4,)), 2)
    assert checked([weight("a", dtype="bfloat16")], model(a=(4,)), 2)


@settings(max_examples=25)
@given(st.lists(st.integers(0, 300), max_size=12), st.integers(1, 2000))
def test_splitting_keeps_order_and_bound(counts, bucket_bytes):
    weights = [weight(str(i), count) for i, count in enumerate(counts)]
    parts = list(split(weights, bucket_bytes))
    assert [w for part in parts for w in part] == weights
    assert all(parts)
    assert all(len(part) == 1 or sum(w.nbytes for w in part) <= bucket_bytes for part in parts)


@pytest.fixture
def buckets():
    made = Buckets(256)
    yield made
    made.close()


def test_a_bucket_can_be_read_by_its_path_and_is_gone_afterwards(buckets):
    weights = [weight("a", 3), weight("empty", 0), weight("b", 20, "bfloat16")]
    bucket = buckets.fill(weights)
    data = Path(bucket.path).read_bytes()
    for want, (name, dtype, shape, offset, nbytes) in zip(weights, bucket.entries, strict=True):
        assert (name, dtype, shape) == (want.name, want.dtype, want.shape)
        assert data[offset : offset + nbytes] == want.data.tobytes()
        assert offset % 64 == 0
    assert bucket.digest == xxhash.xxh3_128_hexdigest(b"".join(w.data.tobytes() for w in weights))
    buckets.close()
    assert not Path(bucket.path).exists()


def test_a_tensor_larger_than_a_copied_chunk_arrives_whole(buckets):
    data = np.random.default_rng(0).integers(0, 256, 2_800_000, np.uint8)
    large = WeightTensor("large", "float32", (700_000,), data)
    bucket = buckets.fill([large])
    assert Path(bucket.path).read_bytes()[:2_800_000] == large.data.tobytes()
    assert bucket.digest == xxhash.xxh3_128_hexdigest(large.data)


def test_memory_is_used_again_when_all_have_let_go_and_not_before(buckets, memory_of_buckets):
    """Pitfall: vLLM keeps tensors until it has all of a layer, and would load what is written over them."""
    first = buckets.fill([weight("a", 3)])
    second = buckets.fill([weight("b", 5)])  # nobody has said a word of the first
    assert second.path != first.path
    buckets.answered(first, [first.inode])
    third = buckets.fill([weight("c", 7)])
    assert third.path not in (first.path, second.path)
    assert Path(first.path).read_bytes()[:12] == weight("a", 3).data.tobytes()
    buckets.answered(third, [])  # and so to the second, whose answer was lost
    for _ in range(5):
        again = buckets.fill([weight("d", 9)])
        assert again.path == first.path
        buckets.answered(again, [])
    assert memory_of_buckets() == 3
    large = buckets.fill([weight("large", 100)])
    assert large.path not in (first.path, second.path, third.path)
    assert memory_of_buckets() == 4
    buckets.close()
    assert memory_of_buckets() == 0


class Worker(WeightUpdates):
    """The worker extension over a model that keeps the last tensor of every bucket it loads."""

    def __init__(self):
        self.model_runner = self
        self.loaded, self.kept = {}, None

    def get_model(self):
        return self

    def load_weights(self, tensors):
        for name, tensor in tensors:
            self.loaded[name] = tensor.tolist()
            self.kept = tensor


def load(worker, bucket):
    return worker.rollout_load_bucket(bucket.path, bucket.entries, bucket.digest)


def test_a_worker_says_what_it_read_and_what_it_holds(buckets, memory_of_buckets):
    worker = Worker()
    for values in ([1.0, 2.0], [3.0, -4.0]):  # the second time through the mapping that it has
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


def test_a_worker_tells_that_a_bucket_is_not_what_was_sent_and_holds_no_adapter_of_it(buckets, monkeypatch):
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


def test_what_a_worker_writes_into_a_bucket_is_its_own_and_is_found(buckets):
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


def test_a_killed_process_leaves_no_memory_behind():
    script = (
        "import numpy as np; from rl_protocol import WeightTensor; from rl_rollout_vllm.buckets import Buckets\n"
        "b = Buckets(1 << 20); print(b.fill([WeightTensor('a', 'float32', (4,), np.zeros(16, np.uint8))]).path, flush=True); input()"
    )
    before = set(Path("/dev/shm").iterdir())
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", script], stdin=pipe, stdout=pipe, text=True) as process:
        path = Path(process.stdout.readline().strip())
        assert path.exists()
        assert set(Path("/dev/shm").iterdir()) <= before
        process.kill()
    assert not path.exists()


RSS_AFTER = """
import numpy, psutil
before = psutil.Process().memory_info().rss
numpy.ones(64 << 20, numpy.uint8)
print((psutil.Process().memory_info().rss - before) >> 20)
"""
KEEPS = {"MALLOC_MMAP_MAX_", "MALLOC_TRIM_THRESHOLD_"}


def test_memory_that_is_freed_stays_with_a_process_in_this_environment():
    """An update prepacks all weights into fresh memory: half of its time would be page faults."""
    cpu = environment(VLLMConfig(model_path="m"), "cpu")
    ours = {name: value for name, value in os.environ.items() if name not in KEEPS}
    left = [
        subprocess.run([sys.executable, "-c", RSS_AFTER], env=ours | more, capture_output=True, check=True)
        for more in ({}, {name: cpu[name] for name in KEEPS})
    ]
    usual, here = (int(done.stdout) for done in left)
    assert usual < 8
    assert here >= 60


def test_the_environment_is_said_and_not_set():
    cpu = environment(VLLMConfig(model_path="m", threads=3), "cpu")
    assert cpu["OMP_NUM_THREADS"] == "3"
    assert cpu["TORCHDYNAMO_DISABLE"] == "1"
    assert cpu.keys() >= KEEPS
    assert "TORCHDYNAMO_DISABLE" not in environment(VLLMConfig(model_path="m", enforce_eager=False), "cpu")
    assert "VLLM_CPU_OMP_THREADS_BIND" not in environment(VLLMConfig(model_path="m"), "cuda")
