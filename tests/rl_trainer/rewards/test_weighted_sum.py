"""Weighted sums of reward functions."""

from __future__ import annotations

import asyncio

import pytest
from reward_samples import samples

from rl_protocol import ConfigError
from rl_trainer.rewards import (
    CombinedScorer,
    InlineScorer,
    Term,
    parse_terms,
)


def test_the_terms_of_a_sum_are_read():
    assert parse_terms("exact_match") == (Term("exact_match", 1.0),)
    assert parse_terms("0.8*math, -0.2*./brief.py:score") == (Term("math", 0.8), Term("./brief.py:score", -0.2))
    assert parse_terms("0.5*a.py:f#form, a.py:f, b#x") == (
        Term("a.py:f", 0.5, "form"),
        Term("a.py:f"),
        Term("b", 1.0, "x"),
    )
    for wrong in ("", "a,a", "x*math", "a,", "a#,b", "#x", "a,a#score"):
        with pytest.raises(ConfigError, match=r"^function"):
            parse_terms(wrong)


def test_a_sum_keeps_its_parts_and_fails_where_one_fails():
    right = InlineScorer(lambda s, text, truth, extra: {"score": float(text == truth), "pred": text})
    brief = InlineScorer(lambda s, text, truth, extra: {"score": 1 / len(text)} if text else None)
    both = CombinedScorer([Term("right", 2.0), Term("brief", -0.5)], [right, brief])
    good, bad = asyncio.run(both.score(samples("tt", "", truth="tt")))
    assert good.numbers == {
        "score": 2.0 * 1 - 0.5 * 0.5,
        "acc": 1.0,
        "right/score": 1.0,
        "right/acc": 1.0,
        "brief/score": 0.5,
        "brief/acc": 0.5,
    }
    assert good.texts == {"pred": "tt"}
    assert (bad.kind, bad.message) == ("no_number", "brief: returned None; it must return a finite number")
    assert bad.where.startswith(__file__)


def test_parts_of_one_function_are_weighted_and_it_is_called_once():
    calls = []

    def judge(source, text, truth, extra):
        calls.append(text)
        return {"score": 1.0, "acc": 0.0, "form": 0.5, **({"brief": -2.0} if text == "all" else {})}

    terms = parse_terms("2*judge, 0.5*judge#form, -1*judge#brief")
    scorer = CombinedScorer(terms, [InlineScorer(judge)])
    whole, lacking = asyncio.run(scorer.score(samples("all", "some")))
    assert calls == ["all", "some"]
    assert whole.numbers["score"] == 2.0 * 1 + 0.5 * 0.5 - 1 * -2.0
    assert (whole.numbers["acc"], whole.numbers["judge/form"]) == (0.0, 0.5)
    assert (lacking.kind, lacking.message) == ("no_number", "judge: returned no 'brief' but ['acc', 'form', 'score']")
    (one,) = asyncio.run(CombinedScorer(parse_terms("judge#form"), [InlineScorer(judge)]).score(samples("all")))
    assert one.numbers["score"] == 0.5
