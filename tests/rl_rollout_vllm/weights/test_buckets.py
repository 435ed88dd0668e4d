"""Weights are checked, split, and copied into shared memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import xxhash
from abandoned_memory import held_by
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_protocol import WeightSyncError, WeightTensor
from rl_rollout_vllm.weights.buckets import Buckets, check_weights, split
from rl_rollout_vllm.weights.checkpoint import Checkpoint


def weight(name, count=4, dtype="float32"):
    size = {"float32": 4, "bfloat16": 2, "int32": 4}[dtype]
    return WeightTensor(name, dtype, (count,), np.arange(count * size, dtype=np.uint8))


def model(tied=False, **shapes):
    return Checkpoint(path=Path("m"), context=8, vocabulary=8, eos_ids=(1,), head_size=64, tied=tied, shapes=shapes)


def test_a_tied_head_that_is_left_out_is_added():
    """Pitfall: vLLM on CPU keeps a prepacked head, which changes only if lm_head.weight is sent."""
    tied = model(tied=True, **{"model.embed_tokens.weight": (4,)})
    embedding = weight("model.embed_tokens.weight")
    sent = check_weights([embedding], tied, 1)
    assert [w.name for w in sent] == ["model.embed_tokens.weight", "lm_head.weight"]
    assert sent[1].data.tobytes() == embedding.data.tobytes()
    assert len(check_weights(sent, tied, 1)) == 2
    with pytest.raises(WeightSyncError, match="unknown"):
        check_weights(sent, model(**{"model.embed_tokens.weight": (4,)}), 1)


def test_a_tied_head_whose_embedding_is_not_known_is_refused():
    with pytest.raises(WeightSyncError, match="ties its head to an embedding that is not called"):
        check_weights([weight("wte")], model(tied=True, wte=(4,)), 1)


def test_integers_are_no_weights():
    with pytest.raises(WeightSyncError, match=r"'a' of version 2 is int32 \(4,\).*float32"):
        check_weights([weight("a", dtype="int32")], model(a=(4,)), 2)
    assert check_weights([weight("a", dtype="bfloat16")], model(a=(4,)), 2)


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


def test_memory_is_reused_only_after_all_workers_released_it(buckets, memory_of_buckets):
    """Pitfall: vLLM keeps tensors until a layer is complete, so they must not be overwritten."""
    first = buckets.fill([weight("a", 3)])
    second = buckets.fill([weight("b", 5)])  # the first has no answer yet
    assert second.path != first.path
    buckets.answered(first, [first.inode])
    third = buckets.fill([weight("c", 7)])
    assert third.path not in (first.path, second.path)
    assert Path(first.path).read_bytes()[:12] == weight("a", 3).data.tobytes()
    buckets.answered(third, [])  # includes the second, whose answer was lost
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


def test_a_killed_process_leaves_no_memory_behind():
    script = (
        "import numpy as np; from rl_protocol import WeightTensor; from rl_rollout_vllm.weights.buckets import Buckets\n"
        "b = Buckets(1 << 20); print(b.fill([WeightTensor('a', 'float32', (4,), np.zeros(16, np.uint8))]).path, flush=True); input()"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", script], stdin=pipe, stdout=pipe, text=True) as process:
        path = Path(process.stdout.readline().strip())
        assert path.exists()
        assert held_by(Path(f"/proc/{process.pid}")) == set()
        process.kill()
    assert not path.exists()
