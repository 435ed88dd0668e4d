"""Check that a model's tokenizer knows the characters of the prompts."""

from __future__ import annotations

from rl_app_ppo.checks.facts import Facts
from rl_protocol import ConfigError

SAMPLE = 100
"""Rows of a split that are looked at."""
MOST_UNKNOWN = 0.1
"""Share of unknown tokens that is no reason to warn."""


def check_prompts_are_known(facts: Facts) -> None:
    """Check that few tokens of the prompts are the tokenizer's token for unknown characters.

    Raises:
        ConfigError: more than `MOST_UNKNOWN` of the tokens of the first rows of a split are.
    """
    word = getattr(facts.tokenizer.model, "unk_token", None)  # byte-level tokenizers have none
    unknown = None if word is None else facts.tokenizer.token_to_id(word)
    if unknown is None:
        return
    for split, rows in facts.data.items():
        prompts = [rows[row].prompt_ids for row in range(min(SAMPLE, len(rows)))]
        share = sum(ids.count(unknown) for ids in prompts) / sum(map(len, prompts))
        if share > MOST_UNKNOWN:
            raise ConfigError(
                f"{share:.0%} of the tokens of the first {len(prompts)} {split} prompts are {word}: the model can't read them. The first is "
                f"{facts.tokenizer.decode(list(prompts[0]), skip_special_tokens=False)!r}. Set model.path to a model whose tokenizer has the "
                "characters of your data; with model.path empty the demo's model is trained, which reads little more than digits."
            )
