"""Resolve `model.path` to a checkpoint folder, also by name in the local Hugging Face cache.

Resolve the paths of adapters.

Nothing is downloaded.
"""

from __future__ import annotations

import json
import re
import shlex
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

from rl_app_ppo.config.full_keys import reference_errors
from rl_app_ppo.config.schema import AppConfig
from rl_protocol import ConfigError, RLError
from rl_protocol.support.hf_checkpoint import INDEX, safetensors_files, text_fields

ADVICE = "Give a folder written by save_pretrained, or leave model.path empty for the demo model."
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
"""`Qwen/Qwen2.5-0.5B-Instruct` or `gpt2`."""
_NEEDED = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]


def given_model(config: AppConfig) -> Path | None:
    """Folder of the model to train; None: the demo model.

    Raises:
        ConfigError: see `find_model`.
    """
    return find_model(config.model.path) if config.model.path else None


def given_reference(config: AppConfig) -> Path | None:
    """Folder of the reference policy; None: it is the initial policy.

    Raises:
        ConfigError: see `find_model`.
    """
    if not config.reference.path:
        return None
    with reference_errors():
        return find_model(config.reference.path)


def given_adapter(config: AppConfig) -> str:
    """Absolute path of the adapter that the policy starts from; empty: none."""
    return _absolute(config.lora.adapter_path)


def given_critic_adapter(config: AppConfig) -> str:
    """The same of the critic."""
    return _absolute(config.critic.adapter_path)


def is_verl_adapter(path: str) -> bool:
    """Whether an adapter to start from is in verl's old format, `adapter_checkpoint/`."""
    folder = Path(path).expanduser()
    if not path or (folder / "adapter_config.json").exists():
        return False
    return (folder / "adapter_checkpoint").is_dir() or any(folder.glob("mp_rank_*_adapter.pt"))


def verl_adapter_layer(path: str) -> dict[str, Any]:
    """Rank and modules, by option of `lora`, of an adapter in verl's old format.

    Raises:
        ConfigError: it can't be read, or rl-megatron-peft, which converts it, is not installed.
    """
    if find_spec("rl_megatron_peft") is None:
        raise ConfigError(
            f"lora.adapter_path={path!r} is in verl's old format, which rl-megatron-peft converts; it is not installed. Run `uv sync --extra "
            "megatron`, or outside this repository `uv pip install 'rl-app-ppo[megatron]'`; or convert it elsewhere with `rl-megatron-peft "
            "convert`, and give the PEFT folder."
        )
    from rl_megatron_peft import verl_adapter_options  # optional

    try:
        found = verl_adapter_options(Path(path).expanduser())
    except RLError as error:
        raise ConfigError(f"lora.adapter_path={path!r} can't be read as verl's old format: {error}") from error
    return {"rank": found.rank, "target_modules": list(found.target_modules)}


def _absolute(path: str) -> str:
    return path and str(Path(path).expanduser().absolute())


def find_model(name: str) -> Path:
    """Find the checkpoint folder of `model.path=name`: a folder, or a model in the local cache.

    Raises:
        ConfigError: there is neither, it is an adapter, or files are missing; names the remedy.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return _whole(path, name)
    if path.exists():
        raise ConfigError(f"model.path={name!r} is a file. {ADVICE}")
    if not _HUB_NAME.fullmatch(name):
        raise ConfigError(f"model.path={name!r} does not exist. {ADVICE}")
    cached = _cached(name)
    if cached is None:
        raise ConfigError(
            f"model.path={name!r} is no folder here, and no whole model of that name is in the local Hugging Face cache "
            f"({_cache()}). A run downloads nothing: run `uv run hf download {name}` first, or set HF_HOME to the cache that has it."
        )
    return _whole(cached, name)


def described_model(config: AppConfig) -> Path | None:
    """Folder with the `config.json` of the model to train, without its weights; None: the demo's.

    Raises:
        ConfigError: there is none; names the command that downloads that file alone.
    """
    return _described(config.model.path) if config.model.path else None


def described_reference(config: AppConfig) -> Path | None:
    """As `described_model`, of the reference policy; None: it is the initial policy."""
    if not config.reference.path:
        return None
    with reference_errors():
        return _described(config.reference.path)


def _described(name: str) -> Path:
    path = Path(name).expanduser()
    if (path / "config.json").exists():
        return path
    if path.exists() or not _HUB_NAME.fullmatch(name):
        raise ConfigError(f"model.path={name!r} has no config.json to plan with. {ADVICE}")
    from huggingface_hub import try_to_load_from_cache  # takes a second to import

    cached = try_to_load_from_cache(name, "config.json")
    if not isinstance(cached, str):
        raise ConfigError(
            f"model.path={name!r} is no folder here, and its config.json is not in the local Hugging Face cache ({_cache()}). A plan needs "
            f"no weights and downloads nothing: run `uv run hf download {name} config.json` first, or give a folder with that file."
        )
    return Path(cached).parent


def _cache() -> str:
    from huggingface_hub import constants

    return constants.HF_HUB_CACHE


def model_type(name: str) -> str | None:
    """`model_type` of the model that `model.path=name` names; None: `find_model` finds none.

    Raises:
        ConfigError: its config.json can't be read.
    """
    path = Path(name).expanduser()
    folder = path if path.is_dir() else _cached(name) if _HUB_NAME.fullmatch(name) else None
    if folder is None or not (folder / "config.json").exists():
        return None
    return str(read_json(folder / "config.json", name).get("model_type", ""))


def _cached(name: str) -> Path | None:
    """The newest snapshot of a model in the local Hugging Face cache, without network access."""
    from huggingface_hub import snapshot_download  # takes a second to import
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(name, local_files_only=True, allow_patterns=_NEEDED))
    except (LocalEntryNotFoundError, HFValidationError):
        return None
    return folder if (folder / "config.json").exists() and any(folder.glob("*.safetensors")) else None


def _whole(path: Path, name: str) -> Path:
    adapter = path / "adapter_config.json"
    if adapter.exists() and not (path / "config.json").exists():
        raise ConfigError(_about_adapter(adapter, name))
    if adapter.exists():
        raise ConfigError(
            f"model.path={name!r} holds a model and an adapter (adapter_config.json), of which transformers loads both and other engines "
            "the model only. Move the files of the adapter to a separate folder."
        )
    missing = [file.name for file in weight_files(path, name) if not file.exists()]
    if missing and (path / INDEX).exists():
        raise ConfigError(
            f"model.path={name!r} lacks {len(missing)} of the files that {INDEX} names, such as {missing[0]}. "
            "Copy or download the folder again."
        )
    if missing and (path / "config.json").exists():
        raise ConfigError(f"model.path={name!r} holds neither {missing[0]} nor {INDEX}. {ADVICE}")
    return path


def weight_files(path: Path, name: str) -> list[Path]:
    """The weight files of the checkpoint folder of `model.path=name`, which need not exist.

    Raises:
        ConfigError: the index of the files can't be read.
    """
    try:
        return safetensors_files(path)
    except ConfigError as error:
        raise ConfigError(f"model.path={name!r}: {error}") from error


def _about_adapter(file: Path, name: str) -> str:
    base = read_json(file, name).get("base_model_name_or_path")
    merged = f"{name.rstrip('/')}-merged"
    command = shlex.join(["uv", "run", "python", "-m", "rl_app_ppo.merge_adapter", name, merged])
    return (
        f"model.path={name!r} holds an adapter (PEFT) of the base model {base!r}, and no model. Merge the two with "
        f"`{command}`, then set model.path={merged}."
    )


def read_json(file: Path, name: str) -> dict[str, Any]:
    """Read a JSON object from a checkpoint folder.

    Raises:
        ConfigError: it can't be read.
    """
    try:
        described: object = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(described, dict):
            return cast("dict[str, Any]", described)
        raise ValueError(f"it is a {type(described).__name__}")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model.path={name!r} is no readable Hugging Face checkpoint folder: {file.name}: {error}. {ADVICE}"
        ) from error


def model_context(path: Path) -> int:
    """The context length of the model at `path`.

    Raises:
        ConfigError: its config.json names none.
    """
    context = text_fields(read_json(path / "config.json", str(path))).get("max_position_embeddings")
    if not isinstance(context, int):
        raise ConfigError(f"model.path={str(path)!r}: config.json names no max_position_embeddings. {ADVICE}")
    return context
