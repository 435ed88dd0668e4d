"""Loads transformers models for training: whole, or of each weight the rows of this rank."""

from __future__ import annotations

import logging
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, GenerationConfig
from transformers import __version__ as transformers_version

from rl_protocol import ConfigError
from rl_protocol.errors import UNREADABLE, described_error
from rl_trainer.backends.packing import PACKED_ATTENTION, register_packed_attention
from rl_trainer.backends.world import World
from rl_trainer.data.images import FAMILIES
from rl_trainer.data.model_families import why_padded
from rl_trainer.kernels.faster_layers import use_faster_layers

try:
    from transformers.conversion_mapping import get_model_conversion_mapping
except ModuleNotFoundError as error:
    # the extra `torch` admits it for the environment of Megatron-Bridge, which loads no model here
    raise ImportError(
        f"rl_trainer.backends needs transformers 5.6 or newer; transformers {transformers_version} is installed."
    ) from error

_logger = logging.getLogger(__name__)

_FLOATS = ("F64", "F32", "F16", "BF16")
"""Element types that a model in float32 is read from."""


def load_model(path: str | Path, *, packed: bool = False, dtype: torch.dtype = torch.float32) -> Any:
    """Load a transformers causal language model of that element type, in evaluation mode.

    Dropout is off also in training, since PPO ratios must be exact. With `packed` the model takes
    only sequences joined end to end (see `rl_trainer.backends.packing`). A model of
    `data.images.FAMILIES` sees images.

    Raises:
        ConfigError: the folder can't be read as a model; it lacks weights, which would be random,
            or they have other shapes; or `packed` a model that is not one of
            `data.model_families.JOINED_FAMILIES` or `data.images.FAMILIES`.
    """
    kind, attention = _kind(path, packed=packed)
    with readable(_refused(path)):
        model, found = kind.from_pretrained(
            str(path),
            dtype=dtype,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **attention,
        )
    if shapes := [f"{name} {list(saved)}, not {list(own)}" for name, saved, own in sorted(found["mismatched_keys"])]:
        raise _unreadable(path, f"weights have other shapes than its config.json says: {_some(shapes)}")
    if missing := sorted(found["missing_keys"]):
        unknown = sorted(found["unexpected_keys"])
        instead = f"; it has {_some(unknown)} instead" if unknown else ""
        raise _unreadable(path, f"it lacks {_some(missing)}, which would be random{instead}")
    use_faster_layers(model)
    return model.eval()


def _some(names: Sequence[str]) -> str:
    """The first three, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _kind(path: str | Path, *, packed: bool) -> tuple[Any, dict[str, Any]]:
    """The class of the model in a folder, and its settings of attention; see `load_model`."""
    family, attention = _family(path), dict[str, Any]()
    if packed:
        if reason := why_padded(family):
            raise ConfigError(f"load_model.path={str(path)!r} {reason}; set UpdateConfig.use_remove_padding to false.")
        register_packed_attention()
        language = {"text_config": PACKED_ATTENTION} if family in FAMILIES else PACKED_ATTENTION
        attention = {"attn_implementation": language}
    return model_class(family), attention


def model_class(family: str) -> Any:
    """The class of transformers that makes models of a `model_type`: with images, or text only."""
    return AutoModelForImageTextToText if family in FAMILIES else AutoModelForCausalLM


def _family(path: str | Path) -> str:
    """`model_type` of the model in a folder."""
    with readable(_refused(path)):
        return str(AutoConfig.from_pretrained(str(path), local_files_only=True).model_type)


def _unreadable(path: str | Path, error: Exception | str) -> ConfigError:
    return ConfigError(f"{_refused(path)}: {error}")


def _refused(path: str | Path) -> str:
    return f"load_model.path={str(path)!r} can't be loaded as a transformers causal language model"


@contextmanager
def readable(refused: str) -> Generator[None]:
    """Context in which transformers reads the model of a folder, or makes it from its config.json.

    Raises:
        ConfigError: it can't; the message is `refused` and the reason.
    """
    try:
        yield
    except (OSError, ValueError) as error:
        raise ConfigError(f"{refused}: {error}") from error
    except (MemoryError, RuntimeError):  # not of the folder
        raise
    except Exception as error:  # boundary to transformers, where a wrong field may raise anything
        raise ConfigError(f"{refused}: {described_error(error)}. Look at its config.json.") from error


@dataclass(frozen=True, slots=True)
class _Place:
    """A weight of a model: that attribute of that module, which stays when the model is sharded."""

    module: torch.nn.Module
    attribute: str
    name: str
    """In its file."""


class UnreadWeights:
    """Weights of a model that are still zeros.

    Args:
        path: the model's folder.
        places: file -> the weights to read from it.
    """

    def __init__(self, path: Path, places: Mapping[Path, Sequence[_Place]]) -> None:
        self._path = path
        self._places = places

    def read(self, world: World) -> int:
        """Read the weights, or of those that FSDP2 sharded the rows of this rank.

        Returns:
            Bytes read.

        Raises:
            ConfigError: a file can't be read.
        """
        read = whole = 0
        try:
            for path, places in self._places.items():
                with safe_open(path, framework="pt") as file, torch.no_grad():
                    for place in places:
                        target = getattr(place.module, place.attribute)
                        found = _own_rows(file, place.name, target, world)
                        (target.to_local() if isinstance(target, DTensor) else target).copy_(found)
                        read += found.nbytes
                        whole += found.element_size() * target.numel()
        except (SafetensorError, OSError) as error:
            raise _unreadable(self._path, error) from error
        _logger.info("Rank %d of %d has read %d of %d bytes of %s.", world.rank, world.size, read, whole, self._path)
        return read


def _own_rows(file: Any, name: str, target: torch.Tensor, world: World) -> torch.Tensor:
    """The part of a tensor in a file that this rank holds."""
    if not isinstance(target, DTensor) or not target.dim():
        return file.get_tensor(name)
    first = world.first_row(target.shape[0])
    return file.get_slice(name)[first : first + len(target.to_local())]


def load_unread(path: Path, *, packed: bool) -> tuple[Any, UnreadWeights | None]:
    """`load_model` without reading: the weights are zeros, which take no memory until written to.

    Returns:
        The model, and what reads its weights; None: they were read, because the folder has no
        safetensors with the model's own names and values.

    Raises:
        ConfigError: see `load_model`.
    """
    kind, attention = _kind(path, packed=packed)
    try:
        files = _files(path)
        zeros = {name: zero for file in sorted(set(files.values())) for name, zero in _zeros(file).items()}
    except (SafetensorError, OSError, *UNREADABLE) as error:
        raise _unreadable(path, error) from error
    with readable(_refused(path)):
        model = _of_zeros(path, kind, zeros, attention) if zeros and zeros.keys() == files.keys() else None
    places = None if model is None else _places(model, files)
    if places is None:
        _logger.warning(
            "Each rank reads all weights of %s: they are not in safetensors under the names of the model's own parameters.",
            path,
        )
        return load_model(path, packed=packed), None
    return model, UnreadWeights(path, places)


def _files(path: Path) -> dict[str, Path]:
    """Name of each weight -> its file, as transformers finds it."""
    single, index = path / "model.safetensors", path / "model.safetensors.index.json"
    if single.exists():
        with safe_open(single, framework="pt") as file:
            return dict.fromkeys(file.keys(), single)
    if not index.exists():
        return {}
    names = msgspec.json.decode(index.read_bytes(), type=_Index).weight_map
    return {name: path / file for name, file in names.items()}


class _Index(msgspec.Struct):
    """`model.safetensors.index.json`; other fields are ignored."""

    weight_map: dict[str, str]


def _zeros(path: Path) -> dict[str, torch.Tensor]:
    """Float32 zeros in the shapes of the tensors of a file; those of other element types lack."""
    with safe_open(path, framework="pt") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
        return {
            name: lazy_zeros(saved.get_shape(), torch.float32)
            for name, saved in slices.items()
            if saved.get_dtype() in _FLOATS
        }


def lazy_zeros(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Zeros on the CPU whose pages appear when they are written to."""
    zeros = np.zeros((*shape, dtype.itemsize), np.uint8)
    return torch.from_numpy(zeros).view(dtype).view(shape)


def _of_zeros(path: Path, kind: Any, zeros: dict[str, torch.Tensor], attention: dict[str, str]) -> Any:
    """The model with these weights; None: transformers computes its weights from those of files, or
    their shapes differ."""
    config = AutoConfig.from_pretrained(str(path), local_files_only=True)
    if getattr(config, "quantization_config", None) is not None:
        return None
    with torch.device("meta"):
        made: Any = type(kind.from_config(config))  # an Auto class takes no state_dict
    model, found = made.from_pretrained(
        None,
        config=config,
        state_dict=zeros,
        dtype=torch.float32,
        output_loading_info=True,
        ignore_mismatched_sizes=True,
        **attention,
    )
    if found["mismatched_keys"]:
        return None
    model.config.name_or_path = model.name_or_path = str(path)
    if (path / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(str(path), local_files_only=True)
    use_faster_layers(model)
    return None if get_model_conversion_mapping(model, add_legacy=False) else model.eval()


def _places(model: Any, files: Mapping[str, Path]) -> dict[Path, list[_Place]] | None:
    """Where each saved tensor belongs; None: they are not all of the model's tensors, each once."""
    state = model.state_dict(keep_vars=True)
    if not files.keys() <= state.keys():
        return None
    saved, own = [id(state[name]) for name in files], {id(tensor) for tensor in state.values()}
    if len(saved) != len(own) or set(saved) != own:
        return None
    places: dict[Path, list[_Place]] = {}
    for name, file in sorted(files.items()):
        module, _, attribute = name.rpartition(".")
        places.setdefault(file, []).append(_Place(model.get_submodule(module), attribute, name))
    return places


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts from a model's configuration; for a model with images, mostly from its text part."""

    hidden_size: int
    context: int
    """Most tokens of a sequence."""
    pad_id: int
    image_token: int | None
    """Placeholder token of an image; None: the model reads text only."""
    banned: tuple[int, ...]
    """Placeholder tokens, which are never generated."""
    pieces: int
    """Image patches per placeholder token."""
    patch_numbers: int
    """Numbers of an image patch."""

    @classmethod
    def of(cls, model: Any) -> Facts:
        config, text = model.config, model.config.get_text_config()
        sees = config.model_type in FAMILIES
        vision = config.vision_config if sees else None
        return cls(
            hidden_size=int(text.hidden_size),
            context=int(text.max_position_embeddings),
            pad_id=int(text.pad_token_id or 0),
            image_token=int(config.image_token_id) if sees else None,
            banned=(int(config.image_token_id), int(config.video_token_id)) if sees else (),
            pieces=int(vision.spatial_merge_size) ** 2 if vision else 0,
            patch_numbers=int(vision.in_channels * vision.temporal_patch_size * vision.patch_size**2) if vision else 0,
        )

    def blank(self, ranks: int) -> int:
        """`token_batch`'s argument: ranks run each layer together, so all must see an image."""
        return self.patch_numbers if ranks > 1 else 0


def layer_names(model: Any) -> tuple[str, ...]:
    """Class names of the repeated blocks of a transformers model."""
    return tuple(model._no_split_modules or ())
