"""Runs inside the engine's process, mixed into vLLM's worker by name: new weights and adapters, bucket by bucket."""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import select
import signal
import threading
import weakref
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rl_rollout_vllm.buckets import DIGEST

if TYPE_CHECKING:
    from rl_rollout_vllm.buckets import Answer, Entry

_PR_SET_PDEATHSIG = 1


class WeightUpdates:
    """Methods that the front calls in every worker. Names start with `rollout_`: vLLM refuses an extension that hides a method of its own.

    An update is `rollout_begin_update`, any number of `rollout_load_bucket`, `rollout_finish_update`. In between the model is in pieces.
    """

    if TYPE_CHECKING:
        model_runner: Any
        model_config: Any

    @cached_property
    def rollout_buckets(self) -> MappedBuckets:
        """The memory of buckets that this process has mapped."""
        return MappedBuckets()

    def rollout_end_with_parent(self, front: int) -> None:
        """Have this process end when the one with the engine's front does, even by SIGKILL: vLLM would live on, holding its memory.

        One worker lives in the process that the front's thread has started, and the kernel ends it with that thread. Of several, each is a
        child of that process, ends with it, and ends it when the front is gone.
        """
        if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL):
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
        if os.getppid() != front:
            watch = threading.Thread(target=_end_engine, args=(os.pidfd_open(front), os.getppid()), daemon=True)
            watch.start()

    def rollout_unlink_shared_memory(self) -> None:
        """Take the names off the memory through which several workers and their engine speak, which all of them have mapped by now.

        vLLM's files in /dev/shm outlive processes that are killed, and some of them others as well.
        """
        for line in Path("/proc/self/maps").read_text().splitlines():
            _, _, name = line.partition("/dev/shm/")
            if name.startswith("psm_") or "-cpushm" in name:
                Path("/dev/shm", name).unlink(missing_ok=True)

    def rollout_release_kv_cache(self) -> int:
        """Give the memory of keys and values back to the system, on CPU; returns its bytes. It is there again, all zeros, when it is touched."""
        madvise = ctypes.CDLL(None, use_errno=True).madvise
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        layers = self.model_runner.compilation_config.static_forward_context.values()
        caches = [layer.kv_cache for layer in layers if isinstance(getattr(layer, "kv_cache", None), torch.Tensor)]
        storages = {cache.untyped_storage().data_ptr(): cache.untyped_storage().nbytes() for cache in caches}
        released = 0
        for address, nbytes in storages.items():
            begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
            whole = (address + nbytes - begin) // mmap.PAGESIZE * mmap.PAGESIZE
            if whole > 0 and madvise(begin, whole, mmap.MADV_DONTNEED):
                raise OSError(ctypes.get_errno(), "madvise(MADV_DONTNEED) failed")
            released += max(whole, 0)
        return released

    def rollout_begin_update(self) -> None:
        """Take the model apart: layers wait for all of their weights, then process them (prepacked on CPU) into the memory they had."""
        from vllm.model_executor.model_loader.reload import (  # pyright: ignore[reportMissingImports]
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        model = self.model_runner.get_model()
        if getattr(
            model, "rollout_updating", False
        ):  # the one before broke off: what it left behind must not count for this one
            finalize_layerwise_reload(model, self.model_config)
        model.rollout_updating = True
        initialize_layerwise_reload(model)

    def rollout_load_bucket(self, path: str, entries: Iterable[Entry], digest: str) -> Answer:
        """Load the tensors of a bucket while a thread digests them: when other bytes were read than were sent, the update must not finish."""
        tensors, reading = self.rollout_buckets.read(path, entries)
        self.model_runner.get_model().load_weights(iter(tensors.items()))
        del tensors
        return self.rollout_buckets.verified(reading, digest), self.rollout_buckets.held()

    def rollout_forget_buckets(self) -> None:
        """Unmap the memory of buckets; what vLLM still holds of it stays until it lets go."""
        self.rollout_buckets.forget()

    def rollout_finish_update(self) -> None:
        """Put the model together again. Caches of the worker and all adapters are dropped with the weights they belonged to."""
        from vllm.model_executor.model_loader.reload import (  # pyright: ignore[reportMissingImports]
            finalize_layerwise_reload,
        )

        model = self.model_runner.get_model()
        finalize_layerwise_reload(model, self.model_config)
        model.rollout_updating = False
        self.model_runner.reset_lora_state()
        self.model_runner.reset_encoder_cache()
        self.model_runner.reset_mm_cache()

    def rollout_load_adapter(self, path: str, entries: Iterable[Entry], digest: str, number: int, peft: str) -> Answer:
        """Hold the LoRA adapter of a bucket as `number`, in place of all others, unless other bytes were read than were sent.

        `peft` is its configuration, JSON.
        """
        tensors, reading = self.rollout_buckets.read(path, entries)
        read = self.rollout_buckets.verified(reading, digest)
        if read == digest:
            self._rollout_hold_adapter(tensors, number, peft)
        del tensors
        return read, self.rollout_buckets.held()

    def _rollout_hold_adapter(self, tensors: Mapping[str, torch.Tensor], number: int, peft: str) -> None:
        from vllm.lora.lora_model import LoRAModel  # pyright: ignore[reportMissingImports]
        from vllm.lora.peft_helper import PEFTHelper  # pyright: ignore[reportMissingImports]

        manager: Any = self.model_runner.lora_manager
        helper = PEFTHelper.from_dict(json.loads(peft))
        helper.validate_legal(manager.lora_config)
        mapper = getattr(self.model_runner.get_model(), "hf_to_vllm_mapper", None)
        adapter = LoRAModel.from_lora_tensors(
            lora_model_id=number,
            tensors={name: tensor.clone() for name, tensor in tensors.items()},  # the bucket goes, the adapter stays
            peft_helper=helper,
            device="cpu",
            dtype=manager.lora_config.lora_dtype,
            weights_mapper=None if mapper is None else mapper.get_rename_mapper(),
        )
        manager.remove_all_adapters()
        manager._adapter_manager.add_adapter(adapter)
        manager._adapter_manager.activate_adapter(number)


class MappedBuckets:
    """Memory of buckets, by inode: mapped once, for as long as the other end fills it again and again."""

    def __init__(self) -> None:
        self._memories: dict[int, mmap.mmap] = {}
        self._views: dict[int, weakref.ref[memoryview]] = {}
        self._reader = ThreadPoolExecutor(1, "rl-rollout-vllm-digest")

    def read(self, path: str, entries: Iterable[Entry]) -> tuple[dict[str, torch.Tensor], Future[str]]:
        """The tensors of a bucket, in its memory, and the DIGEST of their bytes, which is still being computed."""
        inode = Path(path).stat().st_ino  # of memory that is mapped: nothing else has it
        if inode not in self._memories:
            self._memories[inode] = _map(path)
        view = memoryview(self._memories[inode])
        self._views[inode] = weakref.ref(view)  # alive as long as a tensor of it is
        flat = torch.frombuffer(view, dtype=torch.uint8)
        tensors: dict[str, torch.Tensor] = {}
        spans: list[tuple[int, int]] = []
        for name, dtype, shape, offset, nbytes in entries:
            tensors[name] = flat[offset : offset + nbytes].view(getattr(torch, dtype)).reshape(tuple(shape))
            spans.append((offset, offset + nbytes))
        return tensors, self._reader.submit(_digest, self._memories[inode], spans)

    def verified(self, reading: Future[str], sent: str) -> str:
        """The DIGEST of what was read; when it is not the one that was sent, all memory is mapped anew from now on."""
        digest = reading.result()
        if digest != sent:
            self.forget()  # what is wrong may be the mapping
        return digest

    def held(self) -> list[int]:
        """Inodes of the memory that somebody keeps tensors of."""
        self._views = {inode: view for inode, view in self._views.items() if view() is not None}
        return list(self._views)

    def forget(self) -> None:
        """Map nothing any more; memory that somebody keeps tensors of goes with them."""
        self._memories.clear()


def _digest(memory: mmap.mmap, spans: Iterable[tuple[int, int]]) -> str:
    found = DIGEST()
    with memoryview(memory) as view:  # not the one whose life says that a tensor lives
        for begin, end in spans:
            found.update(view[begin:end])
    return found.hexdigest()


def _map(path: str) -> mmap.mmap:
    fd = os.open(path, os.O_RDONLY)
    try:
        # private, so that nobody writes into what others read; writable, for torch wants that
        return mmap.mmap(fd, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(fd)


def _end_engine(front: int, engine: int) -> None:
    """When the process of a pidfd is gone, end the engine's, and with it all workers."""
    waiting = select.poll()
    waiting.register(front, select.POLLIN)
    waiting.poll()
    with contextlib.suppress(ProcessLookupError):
        os.kill(engine, signal.SIGKILL)
