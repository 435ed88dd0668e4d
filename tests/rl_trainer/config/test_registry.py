"""Algorithm names: built-ins, entry points, errors, and combinations that are refused."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from trust import trust

from rl_protocol import ConfigError
from rl_trainer import ActorConfig, AlgorithmConfig, build_graph
from rl_trainer.algorithms.advantages import ADVANTAGE_ESTIMATORS, Estimator
from rl_trainer.algorithms.losses import POLICY_LOSSES, PolicyLoss
from rl_trainer.algorithms.losses.aggregate import BatchCounts
from rl_trainer.algorithms.losses.loss_function import TokenLoss
from rl_trainer.algorithms.losses.policy_objective import PolicyObjective, TokenColumns
from rl_trainer.algorithms.metrics import WeightedMeans
from rl_trainer.config import KLControlConfig, PolicyLossConfig, RolloutCorrectionConfig
from rl_trainer.config.registry import Registry
from rl_trainer.graph.config_checks import check_combination
from rl_trainer.workers.reward import RewardWorker

doubled = Estimator(lambda inputs: ADVANTAGE_ESTIMATORS.get("grpo").estimate(inputs))


@pytest.fixture
def offer(install_plugins):
    """Return a function that installs and allows a package with these advantage estimators."""
    return lambda **points: install_plugins("rl_trainer.advantage_estimators", **points)


def test_a_package_can_offer_an_estimator(offer, monkeypatch):
    monkeypatch.setitem(sys.modules, "someones_package", SimpleNamespace(it=doubled))
    offer(doubled="someones_package:it")
    assert ADVANTAGE_ESTIMATORS.get("doubled") is doubled
    assert ADVANTAGE_ESTIMATORS.names()[-1] == "doubled"
    assert "adv" in build_graph(AlgorithmConfig(adv_estimator="doubled"), ActorConfig())


def test_a_package_can_offer_a_policy_loss(install_plugins, monkeypatch):
    """The table entry needs no torch; the function is imported where the loss is computed."""
    spec = PolicyLoss(function="someones_losses:it", off_policy=False)
    install_plugins("rl_trainer.policy_losses", mine="someones_table:it")
    monkeypatch.setitem(sys.modules, "someones_table", SimpleNamespace(it=spec))
    config = ActorConfig(policy_loss=PolicyLossConfig(loss_mode="mine"))
    check_combination(AlgorithmConfig(), config, 4)
    with pytest.raises(ConfigError, match="someones_losses:it can't be imported: ModuleNotFoundError"):
        PolicyObjective(config, RolloutCorrectionConfig())
    monkeypatch.setitem(sys.modules, "someones_losses", SimpleNamespace(it=lambda x: TokenLoss(loss=x.log_prob * 3)))
    tokens = TokenColumns(
        old_log_prob=torch.zeros(1),
        advantages=torch.ones(1),
        mask=torch.tensor([True]),
        row=torch.tensor([0]),
        rows=1,
    )
    counts = BatchCounts(tokens=1, sequences=1)
    loss = PolicyObjective(config, RolloutCorrectionConfig())(
        torch.tensor([-2.0]), torch.zeros(1), tokens, counts, WeightedMeans()
    )
    assert loss.item() == -6.0


def test_an_estimator_that_reads_an_unwritten_column_is_refused(offer, monkeypatch):
    monkeypatch.setitem(
        sys.modules, "someones_package", SimpleNamespace(it=Estimator(doubled.estimate, reads=("moods",)))
    )
    offer(moody="someones_package:it")
    with pytest.raises(ConfigError, match="reads moods, which no stage writes"):
        check_combination(AlgorithmConfig(adv_estimator="moody"), ActorConfig(), 4)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("no_such_package_here:it", r"adv_estimator='mine': The plug-in 'mine' .* can't be loaded: ModuleNotFound"),
        ("json:nothing", "can't be loaded"),
        (
            "json:dumps",
            r"must be of type Estimator; got function\. Name an object that has it: NAME = Estimator\(dumps\)\.",
        ),
    ],
)
def test_a_package_that_offers_something_else_is_named(offer, value, message):
    offer(mine=value)
    with pytest.raises(ConfigError, match=message):
        ADVANTAGE_ESTIMATORS.get("mine")


def test_what_is_installed_and_not_allowed_is_not_imported(install_plugins):
    site = install_plugins("rl_trainer.advantage_estimators", allowed=False, sly="sly_package:it")
    (site / "sly_package.py").write_text("raise SystemExit('imported')")
    with pytest.raises(
        ConfigError,
        match=r"adv_estimator='sly': The plug-in 'sly' \(sly_package:it of someones1 1\.0\) is installed but not allowed\..*"
        r'RL_PLUGINS: \[rl_trainer\.advantage_estimators\.sly\] distribution = "someones1"',
    ):
        ADVANTAGE_ESTIMATORS.get("sly")
    assert "sly_package" not in sys.modules


def test_a_registered_name_cannot_be_registered_again(offer):
    offer(grpo="json:dumps")
    with pytest.raises(ConfigError, match="the name of several: a built-in, json:dumps"):
        ADVANTAGE_ESTIMATORS.get("grpo")


@pytest.mark.parametrize(
    ("registry_", "wrong", "right"),
    [
        (ADVANTAGE_ESTIMATORS, "grop", "grpo"),
        (ADVANTAGE_ESTIMATORS, "rlo", "rloo"),
        (ADVANTAGE_ESTIMATORS, "grpo_vectorized", "grpo'"),
        (ADVANTAGE_ESTIMATORS, "tir_optimal_token_baseline", "optimal_token_baseline"),
        (POLICY_LOSSES, "gmpo", "geo_mean'"),
        (POLICY_LOSSES, "ppo", "vanilla'"),
        (POLICY_LOSSES, "clipcov", "clip_cov"),
        (POLICY_LOSSES, "dppo", "dppo_tv"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(registry_, wrong, right):
    with pytest.raises(ConfigError, match=f"Did you mean '{right}"):
        registry_.get(wrong)


def test_a_file_without_the_name_of_an_object_is_refused_with_the_form():
    with pytest.raises(ConfigError, match=r"adv_estimator='my/mean\.py' names a file; .* as in my/mean\.py:NAME"):
        ADVANTAGE_ESTIMATORS.get("my/mean.py")


def test_a_relative_path_is_the_file_in_the_working_folder(tmp_path, monkeypatch):
    for place in ("a", "b"):
        file = tmp_path / place / "mine.py"
        file.parent.mkdir()
        file.write_text(f"from types import SimpleNamespace\nMINE = SimpleNamespace(place={place!r})\n")
        trust(file)
    registry = Registry("Config.part", "no_group", SimpleNamespace, {}, {})
    for place in ("a", "b"):
        monkeypatch.chdir(tmp_path / place)
        assert registry.get("mine.py:MINE").place == place


def test_a_registry_without_names_tells_how_to_register_one(install_plugins):
    empty: Registry[Estimator] = Registry("Config.moods", "rl_trainer.moods", Estimator, {}, {})
    with pytest.raises(ConfigError) as refused:
        empty.get("calm")
    assert str(refused.value) == (
        "Config.moods must be empty, because no installed package registers a Estimator; got 'calm'. To register one, install a "
        "package whose pyproject.toml has calm = 'module:object' under [project.entry-points.'rl_trainer.moods']."
    )
    install_plugins("rl_trainer.other_moods", calmer="someones_package:it")
    other: Registry[Estimator] = Registry("Config.moods", "rl_trainer.other_moods", Estimator, {}, {})
    with pytest.raises(ConfigError, match=r"must be one of calmer; got 'calm'\. Did you mean 'calmer'"):
        other.get("calm")


def test_the_driver_checks_every_combination_without_torch():
    code = "import sys, rl_trainer as t; t.build_graph(t.AlgorithmConfig(), t.ActorConfig()); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300).stdout == "False\n"


def correction(**settings):
    return RolloutCorrectionConfig(**settings)


@pytest.mark.parametrize(
    ("algorithm", "actor", "n", "message"),
    [
        (
            {"adv_estimator": "rloo"},
            {},
            1,
            r"RolloutConfig\.n must be at least 2 with AlgorithmConfig\.adv_estimator=rloo",
        ),
        ({"adv_estimator": "gdpo"}, {}, 4, "gdpo_reward_keys goes with an estimator"),
        ({"gdpo_reward_keys": ("score",)}, {}, 4, "gdpo_reward_keys goes with an estimator"),
        (
            {"adv_estimator": "gdpo", "gdpo_reward_keys": ("score",), "use_kl_in_reward": True},
            {},
            4,
            "set it to false and ActorConfig.use_kl_loss to true",
        ),
        (
            {"adv_estimator": "opd", "use_kl_in_reward": True},
            {},
            4,
            "adv_estimator=opd rewards the log-probs of the teacher alone",
        ),
        (
            {"adv_estimator": "optimal_token_baseline", "old_log_prob": "rollout"},
            {},
            4,
            "needs the old_log_prob stage",
        ),
        (
            {},
            {"policy_loss": PolicyLossConfig(loss_mode="geo_mean")},
            4,
            "set ActorConfig.loss_agg_mode=seq-mean-token-mean",
        ),
        (
            {"rollout_correction": correction(rollout_is="token")},
            {"policy_loss": PolicyLossConfig(loss_mode="geo_mean"), "loss_agg_mode": "seq-mean-token-mean"},
            4,
            "rollout_is to sequence or geometric",
        ),
        (
            {"rollout_correction": correction(rollout_is="token"), "old_log_prob": "rollout"},
            {},
            4,
            "would count it twice",
        ),
        (
            {
                "rollout_correction": correction(rollout_is="token", rollout_is_batch_normalize=True),
                "old_log_prob": "rollout",
            },
            {"policy_loss": PolicyLossConfig(loss_mode="gpg")},
            4,
            "needs the weights of the whole batch",
        ),
        (
            {"old_log_prob": "interpolate", "adv_estimator": "optimal_token_baseline"},
            {},
            4,
            "which AlgorithmConfig.old_log_prob=interpolate leaves out",
        ),
        (
            {"old_log_prob": "interpolate"},
            {"policy_loss": PolicyLossConfig(loss_mode="gpg")},
            4,
            "loss_mode=gpg has none; set old_log_prob=rollout",
        ),
        (
            {
                "old_log_prob": "interpolate",
                "rollout_correction": correction(rollout_is="token", rollout_is_batch_normalize=True),
            },
            {},
            4,
            "AlgorithmConfig.old_log_prob=interpolate never has",
        ),
    ],
)
def test_what_contradicts_itself_is_refused(algorithm, actor, n, message):
    with pytest.raises(ConfigError, match=message):
        check_combination(AlgorithmConfig(**algorithm), ActorConfig(**actor), n)


@pytest.mark.parametrize("estimator", ADVANTAGE_ESTIMATORS.names())
@pytest.mark.parametrize("loss", POLICY_LOSSES.names())
def test_every_estimator_goes_with_every_loss(estimator, loss):
    algorithm = AlgorithmConfig(
        adv_estimator=estimator, gdpo_reward_keys=("score", "acc") if estimator == "gdpo" else ()
    )
    actor = ActorConfig(policy_loss=PolicyLossConfig(loss_mode=loss), loss_agg_mode="seq-mean-token-mean")
    check_combination(algorithm, actor, 4)
    assert "update_actor" in build_graph(algorithm, actor)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: ActorConfig(loss_agg_mode="seq-mean-token-sum-norm"), "loss_scale_factor must be at least 1"),
        (lambda: ActorConfig(tau_pos=0), "tau_pos"),
        (lambda: PolicyLossConfig(clip_cov_lb=6), "clip_cov_lb must be below clip_cov_ub"),
        (lambda: PolicyLossConfig(kl_cov_ratio=0), "kl_cov_ratio"),
        (lambda: PolicyLossConfig(ppo_kl_coef=-1), "ppo_kl_coef"),
        (lambda: AlgorithmConfig(kl_penalty="k3+"), "kl_penalty must be one of k1"),
        (lambda: KLControlConfig(type="adaptiv"), "type must be one of fixed, adaptive"),
        (lambda: KLControlConfig(target_kl=0), "target_kl"),
        (lambda: KLControlConfig(horizon=0), "horizon"),
        (
            lambda: AlgorithmConfig(kl_ctrl=KLControlConfig(type="adaptive")),
            "kl_ctrl.type must be fixed without use_kl_in_reward",
        ),
        (
            lambda: AlgorithmConfig(gdpo_reward_keys=("a", "b"), gdpo_reward_weights=(1.0,)),
            "one for each of the 2 keys",
        ),
        (lambda: AlgorithmConfig(gdpo_reward_keys="a"), "gdpo_reward_keys must be a tuple; got 'a'"),
        (lambda: correction(rollout_is="tokens"), "rollout_is must be"),
        (lambda: correction(rollout_is="token", rollout_is_threshold="0"), "rollout_is_threshold"),
        (lambda: correction(rollout_is_batch_normalize=True), "false without"),
        (lambda: correction(rollout_rs=("token_k1",)), "set exactly when"),
        (lambda: correction(rollout_rs_threshold=("2",)), "set exactly when"),
        (lambda: correction(rollout_rs=("token_k9",), rollout_rs_threshold=("2",)), "token_k9"),
    ],
)
def test_settings_out_of_range_name_their_key(build, message):
    with pytest.raises(ConfigError, match=message):
        build()


def test_the_reward_worker_has_a_handler_for_every_stage_of_its_own():
    graph = build_graph(AlgorithmConfig(adv_estimator="remax"), ActorConfig())
    assert {"reward", "baseline", "adv"} <= set(RewardWorker.handlers) & {s.name for s in graph.stages}
