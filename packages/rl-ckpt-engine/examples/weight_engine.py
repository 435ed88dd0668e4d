"""A weight engine of your own: each version is one file, which receivers read."""

import asyncio
import os
import tempfile
import uuid
from pathlib import Path

import numpy as np

from rl_ckpt_engine import (
    Capabilities,
    CheckpointEngineConfig,
    CheckpointEngineManager,
    ReceiverEndpoint,
    SenderEndpoint,
)
from rl_ckpt_engine.engines.base.publishing_engine import PublishingEngine
from rl_ckpt_engine.payload.block_stream import Pacer
from rl_protocol import ConfigError, WeightSyncError, WeightTensor
from rl_protocol.ports import WeightCapabilities


class VersionFile:
    """The sender's side of a version: tensors behind each other, at the offsets of the manifest."""

    unordered = False  # tensors are written one after the other

    def __init__(self, folder):
        self.folder = folder
        self.path = None

    def begin(self, version):
        self.withdraw()
        self.path = self.folder / f"{version}-{uuid.uuid4().hex}"
        self.file = self.path.open("xb")

    def start(self, weight, offset):
        return True  # its bytes must be written

    def write(self, offset, piece):
        self.file.seek(offset)
        self.file.write(piece)

    @property
    def placement(self):  # how receivers find the version
        return self.path.name.encode()

    def complete(self, manifest):
        self.file.close()

    def withdraw(self):
        if self.path is not None:
            self.file.close()
            self.path.unlink(missing_ok=True)

    close = withdraw


class FileEngine(PublishingEngine):
    """The base class knows versions, deadlines and digests; an engine moves bytes."""

    API_VERSION = 1
    name = "file"
    capabilities = Capabilities(same_host_only=False, zero_copy=False, elastic=True, devices=("cpu",), caches=True)

    def __init__(self, config=None):
        super().__init__(config)
        if not self._config.directory:
            raise ConfigError("Engine 'file' needs a folder; set checkpoint_engine.directory.")
        self.folder = Path(self._config.directory).absolute()
        self.folder.mkdir(parents=True, exist_ok=True)

    def prepare(self):  # what the other members learn about this one
        return b"folder " + os.fsencode(self.folder)

    @classmethod
    def _check_members(cls, sender, receivers):
        if not sender.startswith(b"folder ") or {sender, *receivers} != {sender}:
            raise WeightSyncError(f"The members of engine 'file' do not have one folder: {[sender, *receivers]}.")

    def _new_store(self):
        return VersionFile(self.folder)

    async def _pull(self, manifest, buckets, deadline):
        """Fill the memory of each bucket, and yield after each. The caller verifies the bytes."""
        path = self.folder / Path(manifest.placement.decode()).name
        pacer = Pacer(deadline)  # yields to other coroutines, and checks the deadline
        try:
            with path.open("rb") as file:
                for bucket in buckets:
                    file.seek(bucket.start)
                    file.readinto(bucket.memory)
                    await pacer.advance(bucket.memory.nbytes)
                    yield
        except OSError as error:
            raise WeightSyncError(f"Version {manifest.version} can't be read: {error}.") from error


class Trainer:
    capabilities = WeightCapabilities()

    def named_weights(self):
        yield WeightTensor("lm_head.weight", "float32", (4,), np.ones(4, np.float32).view(np.uint8))


class Rollout:
    capabilities, weight_version = WeightCapabilities(), 0

    def load_weights(self, weights, version):
        (self.lm_head,) = (weight.data.view(np.float32).copy() for weight in weights)
        self.weight_version = version


async def main(folder):
    config = CheckpointEngineConfig(backend="file", directory=folder)
    rollout = Rollout()
    receiver = ReceiverEndpoint(FileEngine(config), rollout, name="rollout-0")
    sender = SenderEndpoint(FileEngine(config), Trainer())
    report = await CheckpointEngineManager(sender, [receiver], config).update_weights(1)
    print("version", report.version, rollout.lm_head.tolist(), "on", report.receivers)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(main(folder))
