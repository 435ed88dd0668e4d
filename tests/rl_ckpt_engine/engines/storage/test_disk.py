"""Engine `disk`: a version's files, leftovers, damaged and missing files."""

from __future__ import annotations

import asyncio
import os
import resource
from pathlib import Path

import msgspec
import numpy as np
import pytest
from ckpt_pair import WEIGHTS, Pair, T
from safetensors.numpy import load_file

from rl_ckpt_engine import CheckpointEngineConfig
from rl_ckpt_engine.engines.storage.disk import DiskEngine, latest
from rl_ckpt_engine.engines.storage.safetensors_files import FolderPlacement
from rl_ckpt_engine.testing import assert_same, make_weights, refusal
from rl_protocol.batch.weight_tensor import WeightTensor
from rl_protocol.errors import ConfigError


def test_a_version_on_disk_is_a_checkpoint_that_others_can_read(tmp_path: Path) -> None:
    pair = Pair("disk", tmp_path)
    pair.send()
    assert latest(tmp_path) is None, "not before it is committed"
    pair.sender.finalize(1)
    manifest = latest(tmp_path)
    assert manifest is not None
    assert manifest.version == 1
    (folder,) = tmp_path.glob("v000000000001-*")
    arrays = load_file(folder / "model-00001.safetensors")
    assert {name: a.tobytes() for name, a in arrays.items()} == {w.name: w.data.tobytes() for w in WEIGHTS}
    assert {name: a.shape for name, a in arrays.items()} == {w.name: w.shape for w in WEIGHTS}
    index = msgspec.json.decode((folder / "model.safetensors.index.json").read_bytes())
    assert index["weight_map"] == dict.fromkeys(arrays, "model-00001.safetensors")
    pair.close()
    joiner = DiskEngine(CheckpointEngineConfig(directory=str(tmp_path)))
    joiner.init_process_group(manifest.sender)
    assert_same(asyncio.run(joiner.receive_weights(manifest, timeout_s=T)), WEIGHTS)
    joiner.close()


def test_the_directory_holds_two_versions_at_most_and_no_leftovers(tmp_path: Path) -> None:
    (tmp_path / ".v000000000009-dead.tmp").mkdir()
    pair = Pair("disk", tmp_path)
    for version in (1, 2, 3):
        manifest = pair.send(version=version)
        assert len(list(tmp_path.glob("v*"))) == min(version, 2)
        pair.receive(manifest)
        pair.sender.finalize(version)
    assert [path.name[:13] for path in tmp_path.iterdir() if path.is_dir()] == ["v000000000003"]
    pair.send(version=4)
    pair.sender.abort()
    assert [path.name[:13] for path in tmp_path.iterdir() if path.is_dir()] == ["v000000000003"]
    pair.close()


def test_a_truncated_file_is_an_error_and_kills_no_process(tmp_path: Path) -> None:
    pair = Pair("disk", tmp_path)
    manifest = pair.send()
    (file,) = tmp_path.glob("v*/*.safetensors")
    os.truncate(file, file.stat().st_size - 1000)
    assert "truncated" in refusal(lambda: pair.receive(manifest))
    pair.close()


def test_a_pipe_in_place_of_a_file_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    pair = Pair("disk", tmp_path)
    manifest = pair.send()
    (file,) = tmp_path.glob("v*/*.safetensors")
    file.unlink()
    os.mkfifo(file)
    assert "is not a regular file" in refusal(lambda: pair.receive(manifest))
    pair.close()


def test_places_beyond_any_file_and_files_of_other_folders_are_refused(tmp_path: Path) -> None:
    pair = Pair("disk", tmp_path)
    manifest = pair.send()
    place = msgspec.msgpack.decode(manifest.placement, type=FolderPlacement)
    (tmp_path.parent / "outside.safetensors").write_bytes(bytes(200_000))
    changes = ({"places": tuple((n, 1 << 63) for n, _ in place.places)}, {"files": ("../../outside.safetensors",)})
    for change, why in zip(changes, ("does not fit", "no longer available"), strict=True):
        placement = msgspec.msgpack.encode(msgspec.structs.replace(place, **change))
        forged = msgspec.structs.replace(manifest, placement=placement).sealed()
        assert why in refusal(lambda manifest=forged: pair.receive(manifest))
    pair.close()


def test_many_tensors_take_several_files(tmp_path: Path) -> None:
    pair = Pair("disk", tmp_path)
    many = make_weights([(1,)] * 1500)
    long = [WeightTensor(f"{w.name}{'.layer' * 20}", w.dtype, w.shape, w.data) for w in many]
    manifest = pair.send(long)
    assert len(list(tmp_path.glob("v*/*.safetensors"))) > 1
    assert_same(pair.receive(manifest), long)
    pair.sender.abort()
    name = "x" * 70_000
    assert "too long" in refusal(lambda: pair.send([WeightTensor(name, "uint8", (0,), np.empty(0, np.uint8))]))
    pair.close()


def test_disk_says_what_to_set() -> None:
    with pytest.raises(ConfigError, match=r"set CheckpointEngineConfig\.directory"):
        DiskEngine()


def test_a_full_disk_is_an_error_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    pair = Pair("disk", tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        assert "No space left on device" in refusal(lambda: pair.send())
    assert not list(tmp_path.iterdir())
    assert_same(pair.receive(pair.send()), WEIGHTS)
    pair.close()


def test_a_disk_that_fills_up_with_buffered_bytes_does_not_end_the_sender(tmp_path: Path) -> None:
    """The bytes that did not fit are still in the buffer of the file when it is closed."""
    weights = make_weights([(250,)] * 100, seed=3)
    sender = DiskEngine(CheckpointEngineConfig(directory=str(tmp_path)))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (66 << 10, limits[1]))
    try:
        message = refusal(sender.send_weights(weights, 1, timeout_s=T))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "Is there memory or disk left?" in message
    assert list(tmp_path.iterdir()) == []
    asyncio.run(sender.send_weights(weights, 2, timeout_s=T))
    sender.close()
