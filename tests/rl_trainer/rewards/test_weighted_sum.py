"""Weighted sums of reward functions."""

from __future__ import annotations

import asyncio

import pytest
from reward_samples import samples

from rl_protocol import ConfigError
from rl_trainer.rewards import (
    CombinedScorer,
    InlineScorer,
    Sample,
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
    assert parse_terms("math@openai/gsm8k, 0.5*a.py:f#form@b c, /me@home/a.py:f@x, ~/me@home/judge.toml") == (
        Term("math", source="openai/gsm8k"),
        Term("a.py:f", 0.5, "form", "b c"),
        Term("/me@home/a.py:f", source="x"),
        Term("~/me@home/judge.toml"),
    )
    for wrong in ("", "a,a", "x*math", "a,", "a#,b", "#x", "a,a#score", "a@", "@b", "a@b,a@b", "nan*a", "inf*a"):
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


def test_terms_of_a_data_source_count_only_for_its_rows():
    """Sources x and y have a mix of their own, and all have a bonus."""
    asked = {"math": [], "chat": [], "bonus": []}

    def scorer(name, value):
        def score(source, text, truth, extra):
            asked[name].append((source, text))
            return {"score": value, "acc": value / 2}

        return InlineScorer(score)

    terms = parse_terms("math@x, 2*math@y, chat@y, 0.5*bonus")
    both = CombinedScorer(terms, [scorer("math", 1.0), scorer("chat", 3.0), scorer("bonus", 10.0)])
    rows = [Sample(data_source=source, solution_str=source.upper(), ground_truth="") for source in ("y", "x", "z", "y")]
    outcomes = asyncio.run(both.score(rows))
    assert [one.numbers["score"] for one in outcomes] == [2 * 1 + 3 + 5, 1 + 5, 5, 10]
    assert [one.numbers["acc"] for one in outcomes] == [0.5, 0.5, 5.0, 0.5]
    assert [sorted(one.numbers) for one in outcomes[1:3]] == [
        ["acc", "bonus/acc", "bonus/score", "math/acc", "math/score", "score"],
        ["acc", "bonus/acc", "bonus/score", "score"],
    ]
    assert asked == {
        "math": [("y", "Y"), ("x", "X"), ("y", "Y")],
        "chat": [("y", "Y"), ("y", "Y")],
        "bonus": [("y", "Y"), ("x", "X"), ("z", "Z"), ("y", "Y")],
    }


def test_a_row_for_whose_source_no_term_counts_has_no_score():
    terms = parse_terms("math@x, chat@y")
    only = CombinedScorer(terms, [InlineScorer(lambda *_: 1.0), InlineScorer(lambda *_: 2.0)])
    rows = [Sample(data_source=source, solution_str="t", ground_truth="") for source in ("x", "z")]
    good, bad = asyncio.run(only.score(rows))
    assert good.numbers["score"] == 1.0
    assert (bad.kind, bad.message) == ("no_number", "has no reward function for data_source='z', only for x, y")
