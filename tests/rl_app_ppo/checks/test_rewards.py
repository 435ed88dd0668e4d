"""Reward description files: the checks before a run, and those when the scorer is opened."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web
from tokenizers import Tokenizer, models
from trust import trust

from rl_app_ppo.checks.facts import Facts
from rl_app_ppo.checks.registry import preflight
from rl_app_ppo.checks.rewards import check_rewards, check_sources
from rl_app_ppo.config.loading import load_config
from rl_app_ppo.worker.rewards import open_scorer
from rl_ckpt_engine import PluginPolicy
from rl_protocol import ConfigError
from rl_trainer import PromptRow
from rl_trainer.rewards import Sample


def folder(path, words):
    path.mkdir()
    (path / "config.json").write_text("{}")
    vocabulary = {word: i for i, word in enumerate(words)}
    Tokenizer(models.WordLevel(vocabulary, unk_token=words[0])).save(str(path / "tokenizer.json"))
    return path


@pytest.fixture
def described(tmp_path):
    """Text of a description file -> the reward settings of a run that uses it."""

    def write(text):
        (tmp_path / "judge.toml").write_text(text)
        trust(tmp_path / "judge.toml")
        return load_config([f"reward.function=0.5*exact_match,0.5*{tmp_path}/judge.toml"]).reward

    return write


def test_what_is_wrong_with_a_description_is_said_before_a_run(described, monkeypatch):
    check_rewards(described('kind = "remote"\nurl = "https://judge.example/"'))
    with pytest.raises(ConfigError, match="url must be"):
        check_rewards(described('kind = "remote"\nurl = "judge.example"'))
    settings = described('kind = "remote"\nurl = "https://judge.example/"')
    monkeypatch.delenv("RL_TRUSTED_FILES")
    with pytest.raises(ConfigError, match=r"add --trust \S*judge\.toml to the command"):
        check_rewards(settings)


def test_limits_that_a_description_does_not_read_are_refused():
    assert load_config(["reward.function=judge.toml", "reward.timeout_s=3"]).reward.timeout_s == 3
    load_config(["reward.function=judge.toml,math", "reward.num_workers=3"])
    for key in ("num_workers=3", "memory_mb=512"):
        with pytest.raises(ConfigError, match="has no effect"):
            load_config(["reward.function=0.5*judge.toml,0.5*exact_match", f"reward.{key}"])


def test_a_reward_model_of_another_vocabulary_is_refused(described, tmp_path):
    policy, other = folder(tmp_path / "policy", ["<pad>", "a", "b"]), folder(tmp_path / "other", ["<pad>", "b", "a"])
    settings = described(f'kind = "model"\npath = "{other}"')
    with pytest.raises(ConfigError, match="has another vocabulary than the policy"):
        asyncio.run(open_scorer(settings, policy))


def test_a_served_reward_model_is_a_part_of_the_reward(described, tmp_path):
    async def answer(request):
        asked = await request.json()
        return web.json_response({"data": [{"probs": [float(sum(asked["input"]))]}]})

    async def run():
        app = web.Application()
        app.router.add_post("/classify", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        scorer = await open_scorer(described(f'kind = "served_model"\nurl = "{url}"\nmodel = "m"'), tmp_path)
        try:
            return await scorer.score([Sample(data_source="s", solution_str="7", ground_truth="7", tokens=[3, 4])])
        finally:
            await scorer.close()
            await runner.cleanup()

    (outcome,) = asyncio.run(run())
    assert outcome.numbers["score"] == 0.5 * 1 + 0.5 * 7


def test_rows_for_which_by_data_source_knows_no_reward_are_refused_before_processes_start():
    config = load_config(["reward.function=by_data_source"])  # scores the rows of the demo
    with pytest.raises(ConfigError, match=r"has no reward for data_source='\w+'; it has rewards for openai/gsm8k"):
        preflight(Facts(config, PluginPolicy()))


SOURCE = "sums"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (
            f"reward.function=exact_match@{SOURCE},math@gsm8k",
            rf"reward\.function names data_source='gsm8k'.*have {SOURCE}",
        ),
        (
            "algorithm.by_source=rl_coef=0.5@gsm8k",
            rf"algorithm\.by_source names data_source='gsm8k'.*rows have {SOURCE}",
        ),
    ],
)
def test_a_source_that_no_row_has_is_refused_before_processes_start(override, words):
    with pytest.raises(ConfigError, match=words):
        preflight(Facts(load_config([override]), PluginPolicy()))


def test_settings_by_source_pass_the_checks():
    overrides = [f"algorithm.by_source=adv_estimator=rloo@{SOURCE},rl_coef=0.5@{SOURCE}"]
    preflight(Facts(load_config(overrides), PluginPolicy()))


def rows_of(*sources):
    return [PromptRow(prompt_ids=(1,), data_source=source, ground_truth="") for source in sources]


def test_rows_that_nothing_trains_on_are_refused():
    config = load_config(["algorithm.rl_coef=0", "algorithm.by_source=rl_coef=1@a", "actor.use_kl_loss=false"])
    check_sources(config, {"train": rows_of("a"), "val": rows_of("b")})
    with pytest.raises(ConfigError, match=r"nothing to train on in rows of data_source='b', which it does not name"):
        check_sources(config, {"train": rows_of("a", "b")})
