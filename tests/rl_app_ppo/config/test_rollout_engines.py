"""`rollout.name`: engines of this repository, and those that installed packages offer."""

from __future__ import annotations

import asyncio
import importlib
import json
from types import SimpleNamespace
from unittest.mock import AsyncMock

import msgspec
import pytest

import rl_transferqueue
from rl_app_ppo.checks.facts import Facts
from rl_app_ppo.checks.machine import check_gpus, check_installed_engines
from rl_app_ppo.checks.registry import preflight
from rl_app_ppo.cli.main import main
from rl_app_ppo.config import rollout_engines
from rl_app_ppo.config.loading import load_config, resolve, to_yaml
from rl_app_ppo.config.placement import shares_base, worker_groups
from rl_app_ppo.config.rollout_engines import GROUP, ROLLOUT_ENGINES, RolloutSetup
from rl_app_ppo.worker import build
from rl_app_ppo.worker.messages import BuildCall
from rl_ckpt_engine import PluginPolicy
from rl_protocol import ConfigError
from rl_protocol.ports import GenerationRequest, SamplingParams
from rl_transferqueue import TransferQueueConfig, start_local_plane

PACKAGE = """
from rl_app_ppo.config.rollout_engines import RolloutEngineKind
from rl_protocol import ConfigError
from rl_protocol.ports import WeightCapabilities


class Parrot:
    capabilities = WeightCapabilities()
    weight_version = 0

    def __init__(self, setup):
        self.setup = setup

    def load_weights(self, weights, version):
        self.weight_version = version

    async def generate(self, requests, params):
        from rl_protocol.ports import Generation

        said = [request.prompt_ids[-params.max_new_tokens :] for request in requests]
        return [
            Generation(response_ids=ids, log_probs=(0.0,) * len(ids), finish_reason="length", weight_version=0)
            for ids in said
        ]


class ParrotKind(RolloutEngineKind):
    def missing(self):
        return MISSING

    def check_gpus(self, count):
        if GPUS > count():
            raise ConfigError("rollout.name=parrot needs a GPU.")

    def check_model(self, described, rollout):
        if described["num_attention_heads"] % 3 == 0:
            raise ConfigError("rollout.name=parrot takes no model whose heads are divisible by 3.")

    def build(self, setup):
        return Parrot(setup)


class TogetherKind(ParrotKind):
    shares_process = True


MISSING, GPUS = "", 0
parrot, together = ParrotKind(), TogetherKind()
"""
NAME = "rollout.name=parrot"


@pytest.fixture
def someones(install_plugins, tmp_path):
    """The module of an installed package with two rollout engines, which the operator allows."""
    module = f"someones_{tmp_path.name}"  # registries keep what they have loaded
    points = {name: f"{module}:{name}" for name in ("parrot", "together")}
    (install_plugins(GROUP, **points) / f"{module}.py").write_text(PACKAGE)
    return importlib.import_module(module)


def test_an_engine_of_a_package_generates_in_the_worker(someones, base_model, monkeypatch):
    config = load_config([NAME, f"model.path={base_model}", "rollout.max_batch_size=3"])
    plane = start_local_plane(TransferQueueConfig(backend="memory", capacity_mb=8, segment_mb=1))
    call = BuildCall(config=to_yaml(config), model_path=str(base_model), plane=msgspec.json.encode(plane.descriptor))

    async def generated():
        async with await rl_transferqueue.connect(plane.descriptor) as client:
            monkeypatch.setattr(build, "connect", AsyncMock(return_value=client))
            (worker, endpoint) = (await build.build_workers(("rollout",), call))["rollout"]
            assert endpoint is not None
            asked = [GenerationRequest(uid="p", session=0, prompt_ids=(2, 3, 4))]
            return worker._engine.setup, await worker._engine.generate(asked, SamplingParams(max_new_tokens=2))

    setup, (response,) = asyncio.run(generated())
    plane.close()
    assert response.response_ids == (3, 4)
    assert (setup.path, setup.rollout.max_batch_size, setup.lora) == (base_model, 3, None)


def test_it_has_a_process_of_its_own_unless_it_says_that_it_shares_one(someones):
    assert resolve([NAME]).settings["placement"].origin == "placement=auto with rollout.name=parrot"
    assert ("rollout",) in [group.roles for group in worker_groups(load_config([NAME]))]
    with pytest.raises(
        ConfigError, match=r"rollout\.name=parrot needs its worker's process alone\. Set rollout\.name=hf"
    ):
        load_config([NAME, "placement=fused"])
    fused = load_config(["rollout.name=together"])
    assert fused.placement == ("fused",)
    assert ("actor", "ref", "rollout") in [group.roles for group in worker_groups(fused)]


def test_it_gets_whole_weights_unless_it_says_that_it_takes_adapters(someones, monkeypatch):
    with pytest.raises(ConfigError, match=r"rollout\.name=parrot takes no adapters; got lora\.rank=4"):
        load_config([NAME, "lora.rank=4"])
    assert not load_config([NAME, "lora.rank=4", "lora.merge=true"]).sends_adapters
    monkeypatch.setattr(someones.TogetherKind, "adapters", True)
    assert not shares_base(load_config(["rollout.name=together", "lora.rank=4"]))
    assert shares_base(load_config(["lora.rank=4"]))


def test_its_own_checks_run_before_a_process_starts(someones, tmp_path, monkeypatch):
    config = load_config([NAME])
    preflight(Facts(config, PluginPolicy()))
    with monkeypatch.context() as patch:
        patch.setattr(someones, "GPUS", 99)
        with pytest.raises(ConfigError, match="parrot needs a GPU"):
            check_gpus(config, ("cpu",))
        patch.setattr(someones, "MISSING", "libparrot")
        with pytest.raises(ConfigError, match=r"rollout\.name=parrot needs libparrot, which is not installed"):
            check_installed_engines(config)
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 6, "max_position_embeddings": 64}))
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    with pytest.raises(ConfigError, match="heads are divisible by 3"):
        preflight(Facts(load_config([NAME, f"model.path={tmp_path}"]), PluginPolicy()))


def test_names_that_can_not_be_used_are_refused_with_exit_code_2(install_plugins, tmp_path, capsys):
    install_plugins(GROUP, allowed=False, sly="json:dumps")
    install_plugins(GROUP, odd="json:dumps")
    for name, message in (
        ("vlm", f"rollout.name must be one of {', '.join(ROLLOUT_ENGINES.names())}; got 'vlm'. Did you mean 'vllm'?"),
        ("sly", "is installed but not allowed"),
        ("odd", "must be of type RolloutEngineKind; got function"),
    ):
        assert main([f"rollout.name={name}", f"trainer.output_dir={tmp_path / 'outputs'}"]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
    assert not (tmp_path / "outputs").exists()


def test_the_engines_of_this_repository_say_what_they_can_do():
    hf, vllm = ROLLOUT_ENGINES.get("hf"), ROLLOUT_ENGINES.get("vllm")
    assert (hf.shares_process, hf.shares_base, hf.images, hf.adapters) == (True, True, True, True)
    assert (vllm.shares_process, vllm.shares_base, vllm.images, vllm.adapters) == (False, False, True, True)


VLLM = "rollout.name=vllm"


def vllm_on(device, monkeypatch):
    monkeypatch.setattr(rollout_engines, "require_vllm", lambda: SimpleNamespace(device=device))


def test_vllm_on_gpus_has_time_to_load_to_compile_and_to_capture_graphs(monkeypatch):
    vllm_on("cuda", monkeypatch)
    assert load_config([VLLM]).ray.start_timeout_s == 1800
    assert load_config([VLLM, "ray.start_timeout_s=60"]).ray.start_timeout_s == 60
    vllm_on("cpu", monkeypatch)
    assert load_config([VLLM]).ray.start_timeout_s == load_config([]).ray.start_timeout_s < 1800


def test_vllm_computes_in_bfloat16_by_default_where_it_is_for_gpus(monkeypatch):
    vllm_on("cuda", monkeypatch)
    assert load_config([VLLM]).rollout.dtype == "bfloat16"
    assert load_config([VLLM, "rollout.dtype=float32"]).rollout.dtype == "float32"
    assert load_config([]).rollout.dtype == "float32"
    vllm_on("cpu", monkeypatch)
    assert load_config([VLLM]).rollout.dtype == "float32"


@pytest.mark.parametrize(
    ("device", "setting", "words"),
    [
        ("cuda", "rollout.max_model_len=65", r"max_model_len=65 is more than the model's context of 64"),
        ("cpu", "rollout.max_model_len=16", r"max_model_len=16 leaves no room for a prompt beside rollout.response_length=16"),
        ("cpu", "rollout.temperature=2.5", r"rollout.temperature=2.5: .* must be 0 or a number in 0.01..2; got 2.5"),
        ("cpu", "rollout.val_kwargs.temperature=3", r"rollout.val_kwargs.temperature=3.0: .* got 3.0"),
        ("cpu", "rollout.sampling_replay=false rollout.top_p=0.5 rollout.temperature=0.7", r"rollout.temperature=0.7: .* before top_p 0.5"),
        ("cpu", "rollout.sampling_replay=false rollout.top_p=0.5 rollout.val_kwargs.temperature=0.7", "Set rollout.val_kwargs.temperature to 0 or 1"),
        ("cpu", "rollout.top_p=0.5", "rollout.top_p=0.5 keeps among the rollout.top_k most probable ones; got rollout.top_k=0. Set it"),
        ("cpu", "rollout.stop_token_ids=[15,16]", r"rollout.stop_token_ids must lie in 0..15, .* of the model; got \[16\]"),
        ("cpu", "rollout.gpu_memory_utilization=0.5", r"gpu_memory_utilization=0.5 needs vLLM for GPUs.*Remove it; rollout.kv_cache_mb"),
    ],
)  # fmt: skip
def test_settings_of_vllm_that_do_not_fit_are_refused(device, setting, words, monkeypatch):
    vllm_on(device, monkeypatch)
    described = {"num_attention_heads": 2, "max_position_embeddings": 64, "vocab_size": 16}
    engine = ROLLOUT_ENGINES.get("vllm")
    rollout = load_config([VLLM, "rollout.response_length=16", *setting.split()]).rollout
    with pytest.raises(ConfigError, match=words):
        engine.check_model(described, rollout)
    fine = [
        "rollout.max_model_len=64",
        "rollout.top_p=0.5",
        "rollout.top_k=9",
        "rollout.temperature=0.7",
        *(["rollout.gpu_memory_utilization=0.5"] if device == "cuda" else []),
    ]
    engine.check_model(described, load_config([VLLM, "rollout.response_length=16", *fine]).rollout)


@pytest.mark.parametrize(
    "setting", ["gpu_memory_utilization=0.5", "max_model_len=8", "enforce_eager=true", "kv_cache_mb=9"]
)
def test_settings_of_vllm_are_refused_with_another_engine(setting):
    with pytest.raises(ConfigError, match=r"rollout\.name=vllm"):
        load_config([f"rollout.{setting}"])


@pytest.mark.parametrize(("device", "eager"), [("cuda", False), ("cpu", True)])
def test_vllm_is_built_with_its_settings(device, eager, monkeypatch, tmp_path):
    vllm_on(device, monkeypatch)
    monkeypatch.setattr(rollout_engines, "VLLMRolloutEngine", lambda config: config)
    settings = [
        "rollout.top_k=64",
        "rollout.gpu_memory_utilization=0.5",
        "rollout.max_model_len=32",
        "rollout.max_batch_size=7",
    ]
    setup = RolloutSetup(
        path=tmp_path,
        rollout=load_config([VLLM, *settings]).rollout,
        lora=None,
        threads=1,
        start_timeout_s=1,
        call_timeout_s=1,
    )
    built = ROLLOUT_ENGINES.get("vllm").build(setup)
    assert (built.gpu_memory_utilization, built.max_model_len, built.max_num_seqs) == (0.5, 32, 7)
    assert (built.kv_cache_bytes, built.enforce_eager) == (0, eager)
    assert (built.max_logprobs, built.logprobs_mode) == (64, "processed_logprobs")


def test_an_engine_that_reports_no_experts_is_refused_for_their_replay(monkeypatch):
    with pytest.raises(ConfigError, match=r"rollout\.name=vllm does not report the experts .* or rollout\.name=hf"):
        load_config(["algorithm.router_replay=R3", "rollout.name=vllm"])
    monkeypatch.setattr(type(ROLLOUT_ENGINES.get("hf")), "routed_experts", False)
    with pytest.raises(
        ConfigError, match=r"rollout\.name=hf does not report the experts .* algorithm\.router_replay=R3 replays"
    ):
        load_config(["algorithm.router_replay=R3"])
    assert load_config(["algorithm.router_replay=R2"]).algorithm.router_replay == "R2"


def test_an_engine_that_reports_no_kept_sets_samples_without_their_replay(monkeypatch):
    monkeypatch.setattr(type(ROLLOUT_ENGINES.get("hf")), "kept_sets", False)
    with pytest.raises(ConfigError, match=r"rollout\.name=hf does not report the tokens that rollout\.top_p=0\.5 and"):
        load_config(["rollout.top_p=0.5"])
    assert not load_config(["rollout.top_p=0.5", "rollout.sampling_replay=false"]).rollout.records_kept_sets
    assert not load_config([]).rollout.records_kept_sets
    with pytest.raises(ConfigError, match=r"no effect.*another rollout\.top_p than 1\.0 or rollout\.top_k greater"):
        load_config(["rollout.sampling_replay=false"])
