"""Snapshots of a model under training: per rank its tensors, counters and random state.

Each rank writes its part (safetensors and JSON) and says where it lies in the full tensor, so that
any number of ranks can read it back: each takes the rows it needs from the files that have them.
(torch.distributed.checkpoint does the same with a pickled index.)
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor, Shard

from rl_protocol import ConfigError, OutputError
from rl_protocol.errors import UNREADABLE
from rl_protocol.torch import tensor_digest
from rl_trainer.backends.optimizer import MiniBatchOptimizer, MovingAverage
from rl_trainer.backends.parallel_strategy import reshard
from rl_trainer.backends.world import World
from rl_trainer.checkpoints.resumable import Write

PLACES = "places"
"""Metadata of a file: JSON, name -> [shape of the full tensor, first row in this file]."""
MODEL, OPTIMIZER, AVERAGE = "model/", "optimizer/", "average/"


class RandomState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The global random generators of a process."""

    torch: bytes
    cuda: bytes | None
    numpy: tuple[Literal["MT19937"], list[int], int, int, float]
    python: tuple[int, tuple[int, ...], float | None]

    @classmethod
    def now(cls) -> RandomState:
        """The current states of this process."""
        kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)  # pyright: ignore[reportAssignmentType]
        assert kind == "MT19937"
        cuda = bytes(torch.cuda.get_rng_state().numpy()) if torch.cuda.is_available() else None
        return cls(
            bytes(torch.get_rng_state().numpy()),
            cuda,
            ("MT19937", [int(k) for k in keys], int(position), int(has_gauss), float(cached)),
            random.getstate(),
        )

    def apply(self) -> None:
        """Continue drawing from these states."""
        torch.set_rng_state(torch.frombuffer(bytearray(self.torch), dtype=torch.uint8))
        if self.cuda is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(torch.frombuffer(bytearray(self.cuda), dtype=torch.uint8))
        kind, keys, position, has_gauss, cached = self.numpy
        np.random.set_state((kind, np.array(keys, np.uint32), position, has_gauss, cached))
        random.setstate(self.python)


def seed_generators(*key: int) -> None:
    """Seed the global generators of this process from the key.

    Code that draws without its own seed, such as adapter dropout, then draws the same for equal
    keys.
    """
    of_torch, of_numpy, of_python = (int(one) for one in np.random.SeedSequence(key).generate_state(3))
    torch.manual_seed(of_torch)
    np.random.seed(of_numpy)
    random.seed(of_python)


class RankState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A rank's state beside tensors; all but the random state is equal on all ranks."""

    updates: int
    optimizer_steps: int
    random: RandomState


def snapshot(
    model: torch.nn.Module,
    optimizer: MiniBatchOptimizer,
    updates: int,
    world: World,
    average: MovingAverage | None = None,
) -> Write:
    """Copy this rank's part; see rl_trainer.checkpoints.resumable.Resumable."""
    tensors, places = dict[str, torch.Tensor](), dict[str, tuple[list[int], int]]()
    for name, tensor in _tensors(model, optimizer, average).items():
        own, start = _own(tensor, world)
        if own is not None:
            tensors[name] = own.detach().to("cpu", copy=True).contiguous()
            places[name] = (list(tensor.shape), start)
    rank = RankState(updates=updates, optimizer_steps=optimizer.steps, random=RandomState.now())
    stem = f"rank-{world.rank:05d}-of-{world.size:05d}"

    def write(folder: Path) -> Sequence[Path]:
        data, facts = folder / f"{stem}.safetensors", folder / f"{stem}.json"
        try:
            save_file(tensors, data, metadata={PLACES: json.dumps(places, sort_keys=True)})
        except SafetensorError as error:
            raise OutputError(f"The checkpoint can't be written to {data}: {error}. Free some space.") from error
        facts.write_bytes(msgspec.json.encode(rank))
        return data, facts

    return write


def restore(
    model: torch.nn.Module,
    optimizer: MiniBatchOptimizer,
    folder: Path,
    world: World,
    average: MovingAverage | None = None,
) -> int:
    """Restore the snapshot of all ranks; returns the number of updates made.

    A rank gets the random state of the rank with its number, and keeps its own if there was none.

    Raises:
        ConfigError: it is the state of another model, or can't be read.
    """
    try:
        with ExitStack() as stack:
            saved = SavedTensors(folder, stack)
            moments = [name.removeprefix(OPTIMIZER) for name in saved.names if name.startswith(OPTIMIZER)]
            optimizer.expect(moments)
            wanted = _tensors(model, optimizer, average)
            if wanted.keys() != saved.names:
                raise _another(folder, f"{', '.join(sorted(wanted.keys() ^ saved.names)[:4])} is in one of them only")
            for name, tensor in wanted.items():
                if tuple(tensor.shape) != saved.shape(name):
                    raise _another(
                        folder, f"{name} has the shape {saved.shape(name)} there, {tuple(tensor.shape)} here"
                    )
                saved.read_into(name, tensor, world)
        ranks = {path.stem: path for path in sorted(folder.glob("rank-*.json"))}
        own = [path for stem, path in ranks.items() if stem.startswith(f"rank-{world.rank:05d}-")]
        state = msgspec.json.decode((own or list(ranks.values()))[0].read_bytes(), type=RankState)
    except (SafetensorError, OSError, *UNREADABLE) as error:
        raise ConfigError(
            f"The state in {folder} can't be read: {error}. Give PPOTrainer.resume another checkpoint."
        ) from error
    optimizer.steps = state.optimizer_steps
    if own:
        state.random.apply()
    return state.updates


def state_digest(
    model: torch.nn.Module, optimizer: MiniBatchOptimizer, world: World, average: MovingAverage | None = None
) -> str:
    """See rl_trainer.checkpoints.resumable.Resumable."""
    own = {name: _own(tensor, world)[0] for name, tensor in _tensors(model, optimizer, average).items()}
    return tensor_digest({name: tensor for name, tensor in own.items() if tensor is not None})


class SavedTensors:
    """The tensors of a snapshot, read from whichever files have their rows."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._parts: dict[str, list[tuple[int, Any]]] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for path in sorted(folder.glob("rank-*.safetensors")):
            file = stack.enter_context(safe_open(path, framework="pt"))
            for name, (shape, start) in json.loads((file.metadata() or {})[PLACES]).items():
                self._parts.setdefault(name, []).append((start, file))
                self._shapes[name] = tuple(shape)
        for parts in self._parts.values():
            parts.sort(key=lambda part: part[0])

    @property
    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the full tensor."""
        return self._shapes[name]

    def read_into(self, name: str, target: torch.Tensor, world: World) -> None:
        """Fill a tensor, or this rank's part of it."""
        local = target.to_local() if isinstance(target, DTensor) else target
        with torch.no_grad():
            if not local.dim():
                local.copy_(self._parts[name][0][1].get_tensor(name))
                return
            first = _first_row(target, world) if isinstance(target, DTensor) else 0
            for start, file in self._parts[name]:
                rows = file.get_slice(name)
                begin, end = max(first, start), min(first + len(local), start + rows.get_shape()[0])
                if begin < end:
                    local[begin - first : end - first].copy_(rows[begin - start : end - start])


def _tensors(
    model: torch.nn.Module, optimizer: MiniBatchOptimizer, average: MovingAverage | None
) -> dict[str, torch.Tensor]:
    """What training changes: trainable weights, buffers, moments, and the weights' moving average.
    Frozen weights are in model.path.
    """
    reshard(model)  # the gathered weights may be freed while they are copied
    weights = dict(model.named_parameters())
    all_names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    kept = {name: weight for name, weight in weights.items() if weight.requires_grad}
    kept |= {name: tensor for name, tensor in model.state_dict().items() if name not in all_names}
    named = {MODEL: kept, OPTIMIZER: optimizer.moments(), AVERAGE: average.tensors if average is not None else {}}
    return {f"{kind}{name}": tensor for kind, tensors in named.items() for name, tensor in tensors.items()}


def _own(tensor: torch.Tensor, world: World) -> tuple[torch.Tensor | None, int]:
    """This rank's rows and the number of the first. The first rank owns what is not sharded."""
    if not isinstance(tensor, DTensor):
        return (None if world.rank else tensor), 0
    local = tensor.to_local()
    return (local if len(local) else None), _first_row(tensor, world)


def _first_row(tensor: DTensor, world: World) -> int:
    """First row of this rank."""
    assert tuple(tensor.placements) == (Shard(0),)
    return world.first_row(tensor.shape[0])


def _another(folder: Path, what: str) -> ConfigError:
    return ConfigError(
        f"The state in {folder} is that of another model: {what}. Give PPOTrainer.resume a checkpoint of this one."
    )
