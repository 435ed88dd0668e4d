"""A served reward model: what it is asked, and which answers are scores."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from rl_protocol import ConfigError
from rl_protocol.support.trusted_files import given_files, variables_for
from rl_trainer.rewards import Failure, Sample, Scored
from rl_trainer.rewards.scorer_toml import ServedModelConfig, read_scorer_toml
from rl_trainer.rewards.services.served_model import ServedModelScorer

KEY = "s3cret-of-the-model"
ANSWERS = {
    1: {"data": [{"index": 0, "label": "LABEL_0", "probs": [-1.25], "num_classes": 1}]},
    2: {"data": [{"probs": [0.25, 0.75]}]},
    3: {"data": []},
    4: {"data": [{"probs": [1.0]}, {"probs": [2.0]}]},
    5: ["no classification"],
    6: {"data": [{"probs": ["0.5"]}]},
}
"""First token -> what the server answers; to others it says that it does not take them."""


@asynccontextmanager
async def serving(**facts):
    """Yield (requests, scorer)."""
    seen = []

    async def answer(request):
        body = await request.json()
        seen.append((request.headers.get("Authorization"), body))
        found = ANSWERS.get(body["input"][0])
        return web.Response(status=400, text=KEY) if found is None else web.json_response(found)

    app = web.Application()
    app.router.add_post("/classify", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    scorer = ServedModelScorer(ServedModelConfig(url=url, model="reward", **facts), 60.0, {"K": KEY})
    try:
        yield seen, scorer
    finally:
        await scorer.close()
        await scorer.close()
        await runner.cleanup()


def sample(*tokens):
    return Sample(data_source="s", solution_str="", ground_truth="", tokens=list(tokens))


def test_the_score_is_the_logit_of_the_one_label():
    async def run():
        async with serving(key_variable="K") as (seen, scorer):
            return seen, await scorer.score([sample(1, 7, 8)])

    ((key, body),), (outcome,) = asyncio.run(run())
    assert body == {"model": "reward", "input": [1, 7, 8], "use_activation": False}
    assert key == f"Bearer {KEY}"
    assert outcome == Scored(numbers={"score": -1.25, "acc": -1.25})


def test_what_is_no_score_is_a_failure_of_its_sample():
    async def run():
        async with serving(attempts=1) as (seen, scorer):
            return seen, await scorer.score([sample(n) for n in (2, 3, 4, 5, 6, 9, 1)] + [sample()])

    seen, (*failures, good, empty) = asyncio.run(run())
    assert len(seen) == 7
    assert all(isinstance(one, Failure) for one in (*failures, empty))
    assert [one.kind for one in failures] == ["no_number"] * 5 + ["exception"]
    two, none, sequences, odd, text, refused = (one.message for one in failures)
    assert two == "answered with [2] labels for one sequence; a reward model has one label"
    assert none.startswith("answered with [] labels")
    assert sequences.startswith("answered with [1, 1] labels")
    assert "not a classification" in odd
    assert "not a classification" in text
    assert refused == "was refused with status 400"
    assert isinstance(good, Scored)
    assert empty.message == "has no tokens to score"


def test_a_file_describes_it(tmp_path):
    path = tmp_path / "reward.toml"
    path.write_text('kind = "served_model"\nurl = "http://127.0.0.1:8001"\nmodel = "reward"\nconcurrency = 8\n')
    allowed = variables_for(given_files([path], "trust"))
    found = read_scorer_toml(str(path), allowed)
    assert found == ServedModelConfig(url="http://127.0.0.1:8001", model="reward", concurrency=8)
    path.write_text('kind = "served_model"\nurl = "127.0.0.1:8001"\nmodel = "reward"\n')
    with pytest.raises(ConfigError, match="url must be http"):
        read_scorer_toml(str(path), variables_for(given_files([path], "trust")))
