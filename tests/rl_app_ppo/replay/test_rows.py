"""Texts of rows can't control the terminal."""

from __future__ import annotations

from kept_runs import keep_run

from rl_app_ppo.replay.rows import row_values, rows_text
from rl_trainer.checkpoints.kept_batches import columns_of, read_batch


def test_a_response_that_would_clear_the_terminal_is_escaped(tmp_path):
    files = keep_run(tmp_path, {1: [0.5]})
    batch = read_batch(files.batches, 1)
    found = row_values(batch, columns_of(files.batches, batch), "0", "", lambda ids: f"\x1b[2J\u202e<eos>{ids}")
    (values,) = found.values()
    assert values["responses_text"] == "\x1b[2J\u202e<eos>[5, 6]"
    assert (values["ground_truth"], values["tag/response_len"]) == ("15", 2)
    text = rows_text(found, "")
    assert "'\\x1b[2J\\u202e<eos>[5, 6]'" in text
    assert "\x1b" not in text
