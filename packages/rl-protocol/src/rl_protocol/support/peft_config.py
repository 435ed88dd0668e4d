"""Find fields of PEFT's `adapter_config.json` that change a LoRA adapter and that a reader ignores.

A reader lists the fields it honors; `unread_field` finds any other field whose value changes the
result, including fields of later PEFT versions. The tables follow PEFT 0.21, which is not imported.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import cast

PICKLED_FILE = "adapter_model.bin"
PICKLED = (
    "is a pickle, which can run code and is not read; expected adapter_model.safetensors. If you trust the file, convert it with peft: "
    "PeftModel.from_pretrained(base, folder).save_pretrained(new_folder)"
)
"""What is wrong with that file: a predicate without a full stop."""

VALUE_HEAD = "score"
"""Module of transformers' AutoModelForTokenClassification that maps hidden states to values."""
HEADS = ("classifier", VALUE_HEAD)
"""What peft lists in `modules_to_save` of a model for classification, whichever it has."""

WITHOUT_EFFECT = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "corda_config",  # the settings of an initialization: `init_lora_weights` says which one was used
        "ensure_weight_tying",  # of embeddings, which `modules_to_save` or `target_modules` must name
        "eva_config",
        "inference_mode",
        "lora_dropout",  # of training alone
        "lora_ga_config",
        "loftq_config",
        "megatron_core",
        "peft_type",
        "peft_version",
        "qalora_group_size",  # read with `use_qalora` alone
        "revision",
        "runtime_config",
        "task_type",
    }
)
"""Fields that never change the result."""

_UNUSED = (None, False, "", [], {})
_ADDED_TO_BASE = ("gaussian", "orthogonal", "eva", "mica")
"""Initializations that set A and B and leave the base model's weights as they are."""

_CONVERT = (
    "it subtracts the first A and B from the base model's weights, so the adapter fits only the changed base. Save it as a plain "
    "LoRA adapter with peft: save_pretrained(folder, path_initial_model_for_weight_conversion=FIRST), where FIRST is the adapter "
    "as it was before training"
)
_MERGE = (
    "it replaces the base model's weights by quantized ones, so the adapter fits only these. Merge it with peft "
    "(merge_and_unload) into the base it was trained on and use the merged model"
)


def unread_field(
    fields: Mapping[str, object], honored: Collection[str], saved: Collection[str] = ()
) -> tuple[str, str] | None:
    """Find a field whose value changes what the adapter computes and that the reader does not
    honor.

    >>> unread_field({"r": 8, "lora_bias": False, "bias": "none"}, {"r"})
    >>> unread_field({"r": 8, "some_new_field": 2}, {"r"})
    ('some_new_field', 'is 2, which this reader does not support; it may change what the adapter computes')

    Args:
        fields: the JSON object of `adapter_config.json`, `peft_type` LORA.
        honored: fields that the reader applies.
        saved: modules that it reads whole, which `modules_to_save` may name.

    Returns:
        The field and what is wrong with it (a predicate without a full stop), or None if there is
        no such field.
    """
    for field in sorted(fields):
        if field in honored or field in WITHOUT_EFFECT:
            continue
        value = fields[field]
        if field == "modules_to_save" and isinstance(value, list) and {*cast("list[object]", value)} <= {*saved}:
            why = None
        elif field == "init_lora_weights":
            why = _initialization(value)
        elif value in _UNUSED or (field, value) == ("bias", "none"):
            why = None
        else:
            why = f"is {value!r}, which this reader does not support; it may change what the adapter computes"
        if why is not None:
            return field, why
    return None


def _initialization(value: object) -> str | None:
    """Why an adapter with this initialization can't be added to its base model, or None if it
    can."""
    name = value.lower() if isinstance(value, str) else value
    if name is None or isinstance(name, bool) or name in _ADDED_TO_BASE:
        return None
    if isinstance(name, str) and name.startswith(("pissa", "olora", "corda", "lora_ga")):
        return f"is {value!r}: {_CONVERT}"
    if name == "loftq":
        return f"is {value!r}: {_MERGE}"
    return f"is {value!r}, an initialization this reader does not know; it may have changed the base model's weights"
