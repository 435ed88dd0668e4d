"""Methods that vLLM mixes into its workers: load weights and adapters, free memory."""

from __future__ import annotations

import ctypes
import json
import mmap
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rl_rollout_vllm.vllm_worker.mapped_buckets import MappedBuckets
from rl_rollout_vllm.vllm_worker.plugin import unlink_shared_memory

if TYPE_CHECKING:
    from rl_rollout_vllm.weights.buckets import Answer, Entry


class WorkerExtension:
    """Methods that the engine client calls in every worker.

    Names start with `rollout_` because vLLM refuses an extension that hides one of its own methods.
    An update consists of `rollout_begin_update`, any number of `rollout_load_bucket`, and
    `rollout_finish_update`. In between the model can't be used.
    """

    if TYPE_CHECKING:
        model_runner: Any
        model_config: Any
        vllm_config: Any

    @cached_property
    def rollout_buckets(self) -> MappedBuckets:
        """The buckets that this process has mapped."""
        return MappedBuckets()

    def rollout_unlink_shared_memory(self) -> None:
        """Unlink the shared memory between workers and engine; all of them have mapped it by now.

        vLLM's files in /dev/shm would outlive processes that are killed.
        """
        for line in Path("/proc/self/maps").read_text().splitlines():
            name = line.partition("/dev/shm/")[2].removesuffix(" (deleted)")
            if name.startswith("psm_") or "-cpushm" in name:
                unlink_shared_memory(name)

    def rollout_release_kv_cache(self) -> int:
        """Give the memory of keys and values back to the system, on CPU, and return its bytes.

        It is allocated again, filled with zeros, on the next access.
        """
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

    def rollout_configured(self) -> AbstractContextManager[None]:
        """Context in which layers find vLLM's configuration, as while the model was loaded; those
        of experts over several ranks read it when they process weights."""
        from vllm.config import set_current_vllm_config  # pyright: ignore[reportMissingImports]

        return set_current_vllm_config(self.vllm_config)

    def rollout_begin_update(self) -> None:
        """Start an update: each layer waits for all of its weights, then processes them in place.

        On CPU processing means prepacking.
        """
        from vllm.model_executor.model_loader.reload import (  # pyright: ignore[reportMissingImports]
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        model = self.model_runner.get_model()
        with self.rollout_configured():
            if getattr(model, "rollout_updating", False):  # drop what an unfinished update left behind
                finalize_layerwise_reload(model, self.model_config)
            model.rollout_updating = True
            initialize_layerwise_reload(model)

    def rollout_load_bucket(self, path: str, entries: Iterable[Entry], digest: str) -> Answer:
        """Load the tensors of a bucket while a thread digests them.

        If the digest differs from what was sent, the update must not be finished.
        """
        tensors, reading = self.rollout_buckets.read(path, entries)
        with self.rollout_configured():
            self.model_runner.get_model().load_weights(iter(tensors.items()))
        del tensors
        return self.rollout_buckets.verified(reading, digest), self.rollout_buckets.held()

    def rollout_forget_buckets(self) -> None:
        """Unmap the buckets; memory that vLLM still uses is unmapped later."""
        self.rollout_buckets.forget()

    def rollout_finish_update(self) -> None:
        """Finish an update. Adapters and the worker's caches are dropped with the old weights."""
        from vllm.model_executor.model_loader.reload import (  # pyright: ignore[reportMissingImports]
            finalize_layerwise_reload,
        )

        model = self.model_runner.get_model()
        with self.rollout_configured():
            finalize_layerwise_reload(model, self.model_config)
        model.rollout_updating = False
        self.model_runner.reset_lora_state()
        self.model_runner.reset_encoder_cache()
        self.model_runner.reset_mm_cache()

    def rollout_load_adapter(self, path: str, entries: Iterable[Entry], digest: str, number: int, peft: str) -> Answer:
        """Load the LoRA adapter of a bucket as `number`, in place of all others.

        `peft` is its configuration as JSON. If other bytes were read than were sent, nothing
        changes.
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
            # copied, because the bucket is reused
            tensors={name: tensor.clone() for name, tensor in tensors.items()},
            peft_helper=helper,
            device="cpu",
            dtype=manager.lora_config.lora_dtype,
            weights_mapper=None if mapper is None else mapper.get_rename_mapper(),
        )
        manager.remove_all_adapters()
        manager._adapter_manager.add_adapter(adapter)
        manager._adapter_manager.activate_adapter(number)
