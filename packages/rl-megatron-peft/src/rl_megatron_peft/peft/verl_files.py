"""Names and shapes in verl's old adapter checkpoints, read without torch.

`backend.io.verl_legacy` describes the files and reads their values. Here nothing is unpickled: the
opcodes of a pickle are listed, which runs no code.
"""

from __future__ import annotations

import pickletools
import re
import zipfile
from dataclasses import dataclass
from pathlib import Path

from rl_megatron_peft.base_model.layout import ROW_PARALLEL, Layout
from rl_megatron_peft.base_model.naming import FUSED
from rl_megatron_peft.errors import bad_file
from rl_megatron_peft.peft.checkpoint_folders import LEGACY

FACTOR = re.compile(
    r"(?:module\.)*decoder\.layers\.(\d+)\.(?:self_attention|mlp)\.(linear_\w+)\.adapter\.linear_(in|out)\.weight"
)
"""Name of a factor: layer of the pipeline stage, fused module, `in` or `out`."""
_FILE = re.compile(r"mp_rank_(\d+)(?:_(\d+))?(?:_(\d+))?_adapter\.pt")
_LONGEST_PICKLE = 100_000_000
_MEMO = ("BINPUT", "LONG_BINPUT", "MEMOIZE")


@dataclass(frozen=True, slots=True, kw_only=True)
class VerlAdapterOptions:
    """What verl's old files tell about the adapter; they store no alpha and no base model."""

    rank: int
    target_modules: tuple[str, ...]
    """Logical names, in layer order."""


def verl_adapter_options(path: Path) -> VerlAdapterOptions:
    """Read rank and modules of an adapter from the file of its first rank.

    Args:
        path: an `adapter_checkpoint` folder, or a folder that contains one.

    Raises:
        AdapterError: files are missing or damaged, or hold no LoRA adapter on fused modules; names
            file and field.
    """
    files, layout = files_by_rank(adapter_folder(path))
    first = files[0, 0]
    shapes = _shapes(first)
    ranks, fused = set[int](), set[str]()
    for name, shape in shapes.items():
        match = FACTOR.fullmatch(name)
        if match is None or match[2] not in FUSED:
            raise bad_file(first, name, "is not a factor of a LoRA adapter on a fused module of a dense model")
        fused.add(match[2])
        if match[3] == "in":
            ranks.add(shape[0] * (1 if match[2] in ROW_PARALLEL else layout.tensor))
    if len(ranks) != 1:
        raise bad_file(first, "rank", f"must be the same in all modules; got {sorted(ranks)}")
    targets = tuple(part for name, parts in FUSED.items() if name in fused for part in parts)
    return VerlAdapterOptions(rank=ranks.pop(), target_modules=targets)


def adapter_folder(path: Path) -> Path:
    """The folder with the files: `path`, or its `adapter_checkpoint`."""
    return path / LEGACY if (path / LEGACY).is_dir() else path


def files_by_rank(folder: Path) -> tuple[dict[tuple[int, int], Path], Layout]:
    """Return the file of each (tensor, pipeline) rank, and the layout; no file is missing.

    Raises:
        AdapterError: one is missing, or is of an expert-parallel rank.
    """
    files: dict[tuple[int, int], Path] = {}
    for file in sorted(folder.glob("*.pt")):
        match = _FILE.fullmatch(file.name)
        if match is None or match[3] is not None:
            raise bad_file(
                file, "layout", "is not the file of a tensor- and pipeline-parallel rank; experts are not supported"
            )
        files[int(match[1]), int(match[2] or 0)] = file
    if not files:
        raise bad_file(folder, "layout", "holds no mp_rank_*_adapter.pt")
    layout = Layout(tensor=max(t for t, _ in files) + 1, pipeline=max(p for _, p in files) + 1)
    for tensor in range(layout.tensor):
        for pipeline in range(layout.pipeline):
            if (tensor, pipeline) not in files:
                raise bad_file(folder, "layout", f"lacks the file of tensor rank {tensor}, pipeline stage {pipeline}")
    return files, layout


def _shapes(file: Path) -> dict[str, tuple[int, int]]:
    """Name -> shape of each matrix in a file that torch.save wrote.

    A matrix is its name, `_rebuild_tensor_v2`, its storage as persistent id, then offset and shape.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            (name,) = (one for one in archive.namelist() if one.endswith("/data.pkl"))
            with archive.open(name) as opened:
                listed = list(pickletools.genops(opened.read(_LONGEST_PICKLE)))
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise bad_file(file, "file", f"can't be read as tensors: {error}") from error
    steps = [(code.name, value) for code, value, _ in listed if code.name not in _MEMO]
    found: dict[str, tuple[int, int]] = {}
    key = ""
    for at, (code, value) in enumerate(steps):
        if isinstance(value, str) and code.endswith("UNICODE") and "." in value:  # other texts name no tensor
            key = value
        elif code == "BINPERSID":
            rows, columns, end = steps[at + 2 : at + 5]
            if not isinstance(rows[1], int) or not isinstance(columns[1], int) or end[0] != "TUPLE2":
                raise bad_file(file, key or "adapter_state_dict", "is not a matrix")
            found[key] = (rows[1], columns[1])
    if not found:
        raise bad_file(file, "adapter_state_dict", "is missing or empty")
    return found
