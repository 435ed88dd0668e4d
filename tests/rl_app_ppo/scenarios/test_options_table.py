"""OPTIONS.md is what the declarations of the options say."""

from __future__ import annotations

from golden import TABLE, options_table

from rl_app_ppo.config.loading import options


def test_the_table_of_options_is_up_to_date():
    """To write it again, run `just golden`."""
    assert TABLE.read_text(encoding="utf-8") == options_table()


def test_the_table_has_every_option_with_its_default_bounds_and_verls_key():
    rows = {line.split("`")[1]: line for line in options_table().splitlines() if line.startswith("| `")}
    assert sorted(rows) == sorted(option.key for option in options())
    assert rows["rollout.top_p"] == (
        "| `rollout.top_p` | float | `1.0` | in (0, 1] | sample from the smallest set of tokens with this much probability |  | "
        "`actor_rollout_ref.rollout.top_p` |"
    )
    assert "| resume |" in rows["trainer.save_freq"]
