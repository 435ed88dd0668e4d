"""Weights of experts, one by one as in a checkpoint, joined as transformers holds them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from rl_protocol import WeightTensor
from rl_trainer.config.lora import EXPERT_PARAMETERS


def joined_experts(
    given: Mapping[str, WeightTensor], wanted: Mapping[str, tuple[str, tuple[int, ...]]]
) -> dict[str, WeightTensor]:
    """Join weights that a model holds in one parameter.

    Args:
        given: weights by name, such as `experts.0.gate_proj.weight` [inner, hidden].
        wanted: name of each parameter of the model, such as `experts.gate_up_proj`
            [experts, 2 * inner, hidden] -> its element type and shape.

    Returns:
        The weights by name, in which joined ones replace their parts. Parts that do not make up
        exactly a parameter stay as they are.
    """
    found = dict(given)
    for name, (dtype, shape) in wanted.items():
        module, _, last = name.rpartition(".")
        if name in given or last not in EXPERT_PARAMETERS or len(shape) != 3:
            continue
        experts, rows, columns = shape
        parts = [f"{module}.{expert}.{part}.weight" for expert in range(experts) for part in EXPERT_PARAMETERS[last]]
        size = rows // len(EXPERT_PARAMETERS[last]), columns
        if all(part in given and (given[part].dtype, given[part].shape) == (dtype, size) for part in parts):
            joined = np.concatenate([found.pop(part).data for part in parts])
            found[name] = WeightTensor(name, dtype, shape, joined)
    return found
