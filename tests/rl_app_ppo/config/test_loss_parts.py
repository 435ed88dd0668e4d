"""What the parts of the loss read; what `check_loss_parts` refuses is in test_loading.py."""

from __future__ import annotations

import pytest

from rl_app_ppo.config.loading import load_config
from rl_app_ppo.config.loss_parts import learns_from_rewards


@pytest.mark.parametrize(
    ("words", "learns"),
    [
        (["algorithm=grpo"], True),
        (["algorithm=ppo"], True),
        (["algorithm=sft"], False),
        (["algorithm=opd", "reference.path=teacher"], False),
        (["algorithm=opd_pg", "reference.path=teacher"], False),
    ],
)
def test_rewards_make_advantages_unless_answers_or_a_teacher_are_all_that_is_learned_from(words, learns):
    assert learns_from_rewards(load_config(words)) == learns


def test_one_response_has_no_other_to_compare_with():
    words = ["algorithm=ppo", "data.train_batch_size=1", "actor.ppo_mini_batch_size=1", "critic.ppo_mini_batch_size=1"]
    assert not learns_from_rewards(load_config([*words, "rollout.n=1"]))
    assert learns_from_rewards(load_config([*words, "rollout.n=2"]))
