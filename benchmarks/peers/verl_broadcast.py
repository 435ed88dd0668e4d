"""verl's bucketed broadcast over gloo between this process and one other."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from rl_protocol.batch.weight_tensor import WeightTensor

_spawn = multiprocessing.get_context("spawn")


def verl_receiver(pipe: Connection, store: str, bucket: int, tensors: list[tuple[str, int]]) -> None:
    """Rank 1 of verl's algorithm: receive a bucket while the last one is copied out."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=1, world_size=2)
    mine = {name: torch.empty(size, dtype=torch.uint8) for name, size in tensors}
    buckets = [torch.zeros(bucket, dtype=torch.uint8) for _ in range(2)]
    pipe.send(None)
    while (metas := pipe.recv()) is not None:
        turn = 0
        work = dist.broadcast(buckets[0], 0, async_op=True)
        while metas:
            work.wait()
            ahead = pipe.recv()
            if ahead:
                work = dist.broadcast(buckets[1 - turn], 0, async_op=True)
            for name, at, start, size in metas:
                mine[name][at : at + size].copy_(buckets[turn][start : start + size])
            metas, turn = ahead, 1 - turn
        pipe.send(None)
    dist.destroy_process_group()


class Verl:
    """Rank 0: pack bucket k + 1 while bucket k, preceded by its pickled index, is broadcast."""

    def __init__(self, models: list[list[WeightTensor]], bucket: int, store: str) -> None:
        self.models = [
            [(w.name, torch.frombuffer(w.data.copy(), dtype=torch.uint8)) for w in model] for model in models
        ]
        torch.set_num_threads(1)
        self.bucket = bucket
        self.pipe, theirs = _spawn.Pipe()
        sizes = [(name, data.numel()) for name, data in self.models[0]]
        self.process = _spawn.Process(target=verl_receiver, args=(theirs, store, bucket, sizes), daemon=True)
        self.process.start()
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=2)
        self.buckets = [torch.zeros(self.bucket, dtype=torch.uint8) for _ in range(2)]
        self.pipe.recv()
        self.pids = [os.getpid(), self.process.pid or 0]
        self.version = 0

    def step(self) -> None:
        """One whole sync."""
        self.version += 1
        metas: list[tuple[str, int, int, int]] = []
        filled, turn = 0, 0
        work = None

        def flush() -> None:
            nonlocal metas, filled, turn, work
            self.pipe.send(metas)
            if work is not None:
                work.wait()
            work = dist.broadcast(self.buckets[turn], 0, async_op=True)
            metas, filled, turn = [], 0, 1 - turn

        for name, data in self.models[self.version % 2]:
            at = 0
            while at < data.numel():
                size = min(self.bucket - filled, data.numel() - at)
                self.buckets[turn][filled : filled + size].copy_(data[at : at + size])
                metas.append((name, at, filled, size))
                at, filled = at + size, filled + size
                if filled == self.bucket:
                    flush()
        if metas:
            flush()
        assert work is not None
        work.wait()
        self.pipe.send([])
        self.pipe.recv()

    def close(self) -> None:
        self.pipe.send(None)
        dist.destroy_process_group()
        self.process.join(20)
