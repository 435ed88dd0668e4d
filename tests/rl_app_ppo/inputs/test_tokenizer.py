"""The tokenizer of sessions."""

from __future__ import annotations

from prompt_rows import characters

from rl_app_ppo.inputs.tokenizer import session_tokenizer
from rl_trainer.data.images import Vision


def test_what_a_tool_says_of_images_is_no_image():
    """An image token without an image ends the request of the next turn, and with it the run."""
    core = characters()
    core.add_special_tokens(["<|image_pad|>"])
    vision = Vision(
        token=core.token_to_id("<|image_pad|>"), patch_size=14, merge_size=2, min_pixels=784, max_pixels=7840
    )
    told = "an image is <|image_pad|>;"
    plain, sees = session_tokenizer(core), session_tokenizer(core, vision)
    assert vision.token in plain.encode(told)
    assert sees.encode(told) == [token for token in plain.encode(told) if token != vision.token]
