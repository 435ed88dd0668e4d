"""Texts of Ray's errors."""

from __future__ import annotations

import pytest

from rl_app_ppo.cluster.ray_errors import reason_of


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "The actor died.\n\tactor_id: 1\n\n  its node received SIGTERM\n",
            "The actor died. its node received SIGTERM.",
        ),
        ("\x1b[31mThe actor died\x1b[39m", "The actor died."),
        (
            "The actor died.\n\tpid: 1\nEnd of file. Some common causes include: (1) the OOM killer, (2) ray stop. If so, see dmesg.",
            "The actor died. End of file. It was killed, for instance for lack of memory (see dmesg), or crashed.",
        ),
        ("", ""),
    ],
)
def test_a_reason_is_the_first_and_the_last_line_as_sentences(text: str, reason: str) -> None:
    assert reason_of(RuntimeError(text)) == reason
