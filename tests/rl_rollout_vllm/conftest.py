"""A fake of vLLM's engine: a table of logits behind EngineClient, generating token by token."""

from __future__ import annotations

import asyncio
import gc
import json
import os
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import xxhash

from rl_protocol import RolloutError, WeightTensor
from rl_protocol.testing.bigram_model import CONTEXT, EOS, VOCABULARY, initial_table, log_softmax
from rl_rollout_vllm import EngineDiedError, VLLMConfig, VLLMRolloutEngine
from rl_rollout_vllm.engine.engine_client import TokenChunk

HALVES = ("table.low", "table.high")
ROWS = VOCABULARY // 2


def halves(table):
    """Return the table as two weights, so that an update can fail between them."""
    return [
        WeightTensor(name, "float32", (ROWS, VOCABULARY), part.copy().reshape(-1).view(np.uint8))
        for name, part in zip(HALVES, np.split(table, 2), strict=True)
    ]


def write_checkpoint(folder: Path, table, **config):
    """Write a folder as transformers does."""
    header, data = {}, b""
    for weight in halves(table):
        header[weight.name] = {
            "dtype": "F32",
            "shape": weight.shape,
            "data_offsets": [len(data), len(data) + weight.nbytes],
        }
        data += weight.data.tobytes()
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    sizes = {"max_position_embeddings": CONTEXT, "vocab_size": VOCABULARY, "eos_token_id": EOS, "head_dim": 64}
    (folder / "config.json").write_text(json.dumps(sizes | config))
    return folder


class FakeClient:
    """EngineClient over a table.

    The call number `fail_at` fails; requests stop after `stop_after` tokens.
    """

    def __init__(self, table):
        self.table = table
        self.updating = self.paused = self.dead = self.closed = False
        self.aborted: set[str] = set()
        self.log: list[str] = []
        self.adapters: dict[int, list[str]] = {}
        self.half_tokens = self.stood_still = 0
        self.fail_at: int | None = None
        self.stop_after: int | None = None
        self.lie = 0
        self.keeps = False  # whether it keeps the tensors of the last bucket
        self.seen: list[tuple[str, dict, object]] = []
        self.shown: list[tuple] = []
        self.sleep_levels = (1, 2)

    async def generate(self, request_id, prompt_ids, arguments, adapter, images, *, stream):
        self.seen.append((request_id, arguments, adapter))
        self.shown.append(images)
        if adapter is not None and adapter.number not in self.adapters:
            self.dead = True  # as vLLM does for an adapter that the worker does not hold
        rng = np.random.default_rng(arguments["seed"])
        tokens, log_probs, sent, reason = [], [], 0, None
        while reason is None:
            await asyncio.sleep(0)
            self.stood_still += len(tokens) == self.stop_after
            # a fake may poll
            while (self.paused or len(tokens) == self.stop_after) and request_id not in self.aborted and not self.dead:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            if self.dead:
                raise EngineDiedError("the process is gone")
            if request_id in self.aborted:
                reason = "abort"
            else:
                self.half_tokens += self.updating
                row = log_softmax(self.table, arguments["temperature"])[[*prompt_ids, *tokens][-1]]
                share = np.cumsum(np.exp(row.astype(np.float64)))
                greedy = arguments["temperature"] == 0
                token = int(row.argmax() if greedy else np.searchsorted(share, rng.random() * share[-1], side="right"))
                tokens.append(min(token, VOCABULARY - 1))
                log_probs.append(float(row[tokens[-1]]))
                stopped = tokens[-1] in arguments["stop_token_ids"]
                reason = "stop" if stopped else "length" if len(tokens) == arguments["max_tokens"] else None
            if stream or reason:
                yield TokenChunk(tuple(tokens[sent:]), tuple(log_probs[sent:]), reason)
                sent = len(tokens)

    async def abort(self, request_ids):
        self.aborted |= set(request_ids)

    async def pause(self, mode):
        self.log.append(f"pause {mode}")
        if self.dead:
            raise EngineDiedError("the process is gone")
        self.paused = True

    async def resume(self):
        self.log.append("resume")
        self.paused = False

    async def reset_caches(self):
        self.log.append("reset")

    async def sleep(self, level):
        self.log.append(f"sleep {level}")
        return 4096

    async def wake(self, part):
        self.log.append(f"wake {part}")

    async def close(self):
        self.closed = True

    async def call(self, method, *arguments):
        await asyncio.sleep(0.005)
        self.log.append(method)
        if self.fail_at == len(self.log):
            raise RolloutError("a worker failed")
        if method == "rollout_begin_update":
            self.updating, self.parts = True, {}
            return [None]
        if method == "rollout_finish_update":
            self.table = np.concatenate([self.parts[name] for name in HALVES])
            self.updating, self.adapters = False, {}
            return [None]
        if method == "rollout_forget_buckets":
            return [None]
        path, entries, sent, *rest = arguments
        fd = os.open(path, os.O_RDONLY)
        try:
            data = {name: os.pread(fd, size, offset) for name, _, _, offset, size in entries}
            inode = os.fstat(fd).st_ino
        finally:
            os.close(fd)
        digest = xxhash.xxh3_128_hexdigest(b"".join(data.values()))
        if self.lie or digest != sent:
            return [["other bytes", []]]
        read = {name: np.frombuffer(data[name], np.float32).reshape(shape) for name, _, shape, _, _ in entries}
        if method == "rollout_load_bucket":
            self.parts |= read
        else:
            self.adapters = {rest[0]: sorted(read)}
        return [[digest, [inode] if self.keeps else []]]


class Opened:
    """An engine over a fake client."""

    def __init__(self, folder, **settings):
        self.client = FakeClient(initial_table())
        config = VLLMConfig(model_path=str(folder), **{"bucket_bytes": 64, "call_timeout_s": 120.0, **settings})
        self.engine = VLLMRolloutEngine(config, start=self.start)

    async def start(self, config, model):
        return self.client


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("bigram"), initial_table())


@pytest.fixture
def opened(checkpoint):
    """make(**settings) -> engine and its client; closed after the test."""
    made = []

    def make(**settings):
        made.append(Opened(checkpoint, **settings))
        return made[-1].engine, made[-1].client

    yield make
    for one in made:
        one.engine.close()
        assert one.client.closed


@pytest.fixture
def other_weights():
    """Weights that fit the engine and differ from its own."""
    return halves(initial_table(1))


@pytest.fixture
def memory_of_buckets():
    """A function that counts the buckets this process has open or mapped."""

    def count():
        paths = set()
        for fd in Path("/proc/self/fd").iterdir():
            with suppress(OSError):  # the descriptor of this listing
                paths.add((str(fd.readlink()), fd.stat().st_ino))
        for line in Path("/proc/self/maps").read_text().splitlines():
            _, _, _, _, inode, *path = line.split(None, 5)
            paths.add(("".join(path), int(inode)))
        return len({inode for path, inode in paths if path.startswith("/memfd:rl-rollout-vllm")})

    gc.collect()
    assert count() == 0, "an earlier test left memory behind"
    return count
