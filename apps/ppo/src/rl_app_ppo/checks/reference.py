"""Check that the reference policy fits the policy under training."""

from __future__ import annotations

from pathlib import Path

from rl_app_ppo.config.full_keys import reference_errors
from rl_app_ppo.config.model_path import given_reference, model_context, read_json
from rl_app_ppo.config.schema import AppConfig
from rl_app_ppo.inputs.tokenizer import load_tokenizer, vision_of
from rl_app_ppo.inputs.weight_files import check_weights
from rl_protocol import ConfigError
from rl_protocol.counted import counted
from rl_trainer.data.images import Vision
from rl_trainer.data.model_families import why_padded


def check_teacher_prompt(config: AppConfig, longest: int, context: int) -> None:
    """Check that the teacher's prompts fit a forward pass, and the policy where it is its own
    teacher.

    Args:
        config: the configuration of the run.
        longest: tokens of the longest prompt of the teacher.
        context: of the model.

    Raises:
        ConfigError: they don't.
    """
    most, room = longest + config.rollout.response_length, config.actor.ppo_max_token_len
    if room and most > room:
        raise ConfigError(
            f"actor.ppo_max_token_len must hold the longest prompt of {longest} tokens that algorithm.teacher_context makes and "
            f"rollout.response_length={config.rollout.response_length}; got {room}."
        )
    if most > context and not config.reference.path:
        raise ConfigError(
            f"algorithm.teacher_context makes prompts of up to {longest} tokens, and with rollout.response_length={config.rollout.response_length} "
            f"that is {most}, more than the model's context of {context}; shorten it, or lower rollout.response_length."
        )


def check_reference(config: AppConfig, vocabulary: dict[str, int], longest: int, sight: Vision | None) -> Path | None:
    """Check the model of `reference.path`; returns its folder.

    Args:
        config: the configuration of the run.
        vocabulary: token -> id of the policy's tokenizer.
        longest: most tokens of a prompt and its response.
        sight: how the policy reads images; None: it reads only text.

    Raises:
        ConfigError: it is not whole, its tokenizer differs, its context is too short, it reads
            images in another way, or its sequences can't be joined.
    """
    path = given_reference(config)
    if path is None:
        return None
    named = f"reference.path={config.reference.path!r}"
    _check_sight(named, vision_of(path), sight)
    with reference_errors():
        described = read_json(path / "config.json", config.reference.path)
        check_weights(path, described)
        own = load_tokenizer(path).get_vocab()
    different = sorted(token for token in own.keys() | vocabulary.keys() if own.get(token) != vocabulary.get(token))
    if different:
        raise ConfigError(
            f"{named} has another tokenizer than the policy: it differs in {counted(len(different), 'token')}, such as {different[0]!r}, and "
            "the reference reads the policy's token ids. Set a model with the same tokenizer."
        )
    context = model_context(path)
    if longest > context:
        raise ConfigError(
            f"{named} has a context of {context} tokens, and a prompt and its response can have {longest}; set rollout.response_length or "
            "data.max_prompt_length lower, or another reference.path."
        )
    reason = why_padded(str(described.get("model_type", "")))
    if reason and config.actor.use_remove_padding:
        raise ConfigError(f"{named} {reason}; actor.use_remove_padding must be False, got True.")
    return path


def _check_sight(named: str, own: Vision | None, policy: Vision | None) -> None:
    """Check that the reference can read the images of prompts, which are cut for the policy."""
    if own is None or policy is None:
        if own is not policy:
            one, other = ("only text", "images too") if own is None else ("images", "only text")
            raise ConfigError(f"{named} reads {one}, and the policy {other}; set a model that reads the same.")
        return
    for field in ("token", "patch_size", "merge_size"):
        mine, wanted = getattr(own, field), getattr(policy, field)
        if mine != wanted:
            raise ConfigError(
                f"{named} reads images with {field}={mine}, and the policy, for which prompts are made, with {wanted}; set a model of a family "
                "that cuts images alike."
            )
