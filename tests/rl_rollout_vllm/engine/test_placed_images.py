"""Images find their tokens in the prompt."""

from __future__ import annotations

import numpy as np
import pytest

from rl_protocol import RolloutError
from rl_protocol.ports import GenerationRequest, ImageInput
from rl_rollout_vllm.engine.placed_images import PlacedImage, check_images, placed_images
from rl_rollout_vllm.weights.checkpoint import Vision

VISION = Vision(token=3, patches=4, never_generated=(3, 8))


def image(height, width, value=0.0):
    return ImageInput(np.full((height * width, 6), value, np.float32), (1, height, width))


def request(ids, *images):
    return GenerationRequest(uid="p", session=0, prompt_ids=ids, images=images)


def test_each_image_has_the_next_tokens_also_without_text_between_them():
    """Two, one and one tokens; the last token 3 was generated in an earlier turn."""
    wide, small, other = image(2, 4), image(2, 2), image(2, 2)
    placed = placed_images((5, 3, 3, 3, 7, 3, 9, 3), (wide, small, other), VISION)
    assert [(one.image, one.offset, one.length) for one in placed] == [(wide, 1, 2), (small, 3, 1), (other, 5, 1)]


@pytest.mark.parametrize(
    ("ids", "images", "message"),
    [
        ((5, 3, 6), (image(2, 4),), "the prompt has 1 image token, and its 1 image must have 2"),
        ((5, 3, 6), (), "the prompt has 1 image token, and its 0 images must have 0"),
        ((5, 6), (image(2, 2),), "the prompt has 0 image tokens, and its 1 image must have 1"),
    ],
)
def test_images_and_tokens_that_do_not_match_are_refused(ids, images, message):
    with pytest.raises(RolloutError, match=rf"Request 'p': {message}"):
        check_images(request(ids, *images), VISION, "Request 'p'")


def test_a_model_without_sight_takes_any_token_and_no_image():
    check_images(request((3, 3)), None, "Request 'p'")
    with pytest.raises(RolloutError, match="it has images, and the model of this engine sees none"):
        check_images(request((3,), image(2, 2)), None, "Request 'p'")


def test_equal_images_have_equal_digests_and_no_others():
    same = [PlacedImage(image(2, 4), offset, 2).digest for offset in (0, 9)]
    others = [PlacedImage(one, 0, 2).digest for one in (image(2, 4, 1.0), image(4, 2))]
    assert same[0] == same[1]
    assert len({same[0], *others}) == 3
