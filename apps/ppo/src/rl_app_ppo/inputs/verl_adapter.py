"""Check adapters in verl's old format (`adapter_checkpoint/`), which a run converts at its start.

Needs rl-megatron-peft, of the extra `megatron`, with every training engine. Imports no torch.
"""

from __future__ import annotations

from pathlib import Path

from rl_app_ppo.config.model_path import verl_adapter_layer
from rl_app_ppo.config.schema import AppConfig
from rl_protocol import ConfigError


def check_verl_adapter(config: AppConfig, base: Path | None) -> None:
    """Check that the adapter of `lora.adapter_path` can be converted, and that `lora` describes it.

    Args:
        config: the configuration, with an adapter in verl's old format.
        base: folder of the model; None: the demo model.

    Raises:
        ConfigError: it can't, or an option differs; names the key.
    """
    given = config.lora.adapter_path
    if base is None:
        raise ConfigError(
            f"lora.adapter_path={given!r} is in verl's old format, whose files name no base model; set model.path to the model that it was "
            "trained on."
        )
    from rl_megatron_peft import ModelShape  # optional: verl_adapter_layer has found it

    lora, read = config.lora, verl_adapter_layer(given)
    try:
        ModelShape.read(base)
    except ConfigError as error:
        raise ConfigError(
            f"lora.adapter_path={given!r} is in verl's old format, which can't be converted for model.path={str(base)!r}: {error}"
        ) from error
    wanted: dict[str, tuple[object, object]] = {
        "rank": (lora.rank, read["rank"]),
        "target_modules": (sorted(lora.targets()), sorted(read["target_modules"])),
        "exclude": (list(lora.exclude), []),
        "use_dora": (lora.use_dora, False),
        "use_rslora": (lora.use_rslora, False),
    }
    for name, (got, expected) in wanted.items():
        if got != expected:
            raise ConfigError(f"lora.{name} must be {expected}, as in lora.adapter_path={given!r}; got {got}.")
