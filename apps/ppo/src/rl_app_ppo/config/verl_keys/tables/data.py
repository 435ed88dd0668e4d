"""Prompts and rewards."""

from __future__ import annotations

from collections.abc import Iterator

from rl_app_ppo.config.verl_keys import conversions
from rl_app_ppo.config.verl_keys.key_entries import Entry, checked, converted, no_effect, only, unsupported

_CURRICULUM = "set data.curriculum to the name of a curriculum that an installed package offers"
_FUNCTION = "write a reward function and set reward.function=path.py:name"
_JUDGE = "describe the reward model in a file, reward.function=model.toml (rewards.md of rl-trainer: Services and reward models)"
_MANAGER = "reward.function and reward.overlong say how responses are scored"
_LOADING = "it concerns how rows are loaded"


def _overlong(prefix: str) -> Iterator[Entry]:
    yield converted(f"{prefix}.enable", "reward.overlong.buffer_len", lambda _v, _verl: {})
    yield converted(f"{prefix}.len", "reward.overlong.buffer_len", conversions.overlong("buffer_len", prefix))
    yield converted(
        f"{prefix}.penalty_factor", "reward.overlong.penalty_factor", conversions.overlong("penalty_factor", prefix)
    )
    yield no_effect("samples/ of the run folder holds scores and lengths", f"{prefix}.log")


def _function(prefix: str) -> Iterator[Entry]:
    yield converted(f"{prefix}.path", "reward.function", conversions.custom_reward(prefix))
    yield converted(f"{prefix}.name", "reward.function", lambda _v, _verl: {})
    yield unsupported("a reward function is called with verl's four arguments alone", f"{prefix}.reward_kwargs.*")


ENTRIES: tuple[Entry, ...] = (
    converted("data.shuffle", "data.curriculum", lambda v, _: {} if v else {"data.curriculum": "sequential"}),
    converted("data.reward_fn_key", "reward.function", conversions.reward_by_source),
    checked(
        "data.truncation",
        conversions.truncation,
        "prompts are not cut; data.filter_overlong_prompts leaves long ones out",
    ),
    only("data.train_max_samples", -1, why="all rows of data.train_files are used; give a shorter file"),
    no_effect("all rows of data.val_files are used; give a shorter file", "data.val_max_samples"),
    unsupported(_CURRICULUM, "data.sampler.*"),
    unsupported("rows are read from files in verl's format", "data.custom_cls.* data.datagen.*"),
    unsupported("the tokenizer is that of model.path", "data.tokenizer"),
    unsupported("the chat template has no arguments", "data.apply_chat_template_kwargs.*"),
    unsupported("images are cut as the model's folder says", "data.mm_processor_kwargs.*"),
    only("data.image_key", "images", why="the column of images is named images"),
    no_effect("there is no video and no audio", "data.video_key data.audio_key"),
    unsupported(conversions.TOOLS, "data.tool_config_path data.function_tool_path"),
    no_effect(
        _LOADING,
        """gen_batch_size val_batch_size dataloader_num_workers filter_overlong_prompts_workers return_raw_input_ids return_raw_chat
        return_full_prompt return_multi_modal_inputs use_shm validation_shuffle image_patch_size trust_remote_code cache_dir""",
        prefix="data.",
    ),
    # -- rewards
    *_overlong("reward.reward_kwargs.overlong_buffer_cfg"),
    *_overlong("reward_model.reward_kwargs.overlong_buffer_cfg"),
    *_overlong("reward_model.overlong_buffer"),
    *(
        no_effect("reward.overlong reaches back from rollout.response_length", f"{prefix}.reward_kwargs.max_resp_len")
        for prefix in ("reward", "reward_model")
    ),
    *_function("reward.custom_reward_function"),
    *_function("custom_reward_function"),
    checked("reward.reward_manager.name", conversions.reward_manager, _MANAGER),
    checked("reward_model.reward_manager", conversions.reward_manager, _MANAGER),
    only("reward.reward_manager.source", "register", why=_FUNCTION),
    unsupported(_FUNCTION, "reward.reward_manager.module.path"),
    no_effect("verl reads it with reward_manager.module.path alone", "reward.reward_manager.module.name"),
    no_effect("set reward.num_workers", "reward.num_workers reward_model.num_workers"),
    unsupported(_JUDGE, "reward.reward_model.enable"),
    unsupported(_JUDGE, "reward.reward_model.*", needs="reward.reward_model.enable"),
    unsupported(_FUNCTION, "reward.sandbox_fusion.url sandbox_fusion.url"),
    no_effect("verl reads it with sandbox_fusion.url alone", "reward.sandbox_fusion.* sandbox_fusion.*"),
    unsupported(_JUDGE, "reward_model.enable"),
    unsupported(
        _FUNCTION,
        "reward_model.reward_loop_source reward_model.reward_loop_module_path reward_model.reward_loop_class_name",
    ),
    unsupported(_FUNCTION, "reward.reward_kwargs.* reward_model.reward_kwargs.*"),
    unsupported(_JUDGE, "reward_model.*", needs="reward_model.enable"),
)
