"""Which process of a run gets how many GPUs, and what is refused when there are too few."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from trust import trust

from rl_app_ppo.config import rollout_engines
from rl_app_ppo.config.devices import described_gpus, idle_gpus, plan_processes
from rl_app_ppo.config.loading import load_config
from rl_protocol import ConfigError

FSDP, KL, VLLM = "model_engine=fsdp", "actor.use_kl_loss=true", "rollout.name=vllm"
PPO = ("algorithm=ppo", FSDP, KL)


@pytest.fixture(autouse=True)
def vllm_for_gpus(monkeypatch):
    monkeypatch.setattr(rollout_engines, "require_vllm", lambda: SimpleNamespace(device="cuda"))


def gpus(found, *overrides):
    return {process.name: process.gpus for process in plan_processes(load_config(overrides), found)}


@pytest.mark.parametrize("engine", ["torch", "fsdp", "megatron"])
def test_without_gpus_no_process_gets_one(engine):
    planned = gpus(0, f"model_engine={engine}", "placement=separate", KL)
    assert planned == {"actor": 0, "ref": 0, "rollout-0": 0, "rollout-1": 0, "reward": 0}


def test_the_torch_engine_has_a_gpu_unless_its_device_is_the_cpu():
    roles = ("model_engine=torch", "algorithm=ppo", KL, "placement=actor+ref")
    assert gpus(8, *roles) == {"actor_ref": 1, "critic": 1, "rollout-0": 1, "rollout-1": 1, "reward": 0}
    on_cpu = gpus(8, *roles, "torch.device=cpu", "rollout.device=cpu")
    assert set(on_cpu.values()) == {0}
    assert gpus(8, *roles, "rollout.device=cpu") == {**on_cpu, "actor_ref": 1, "critic": 1}


def test_roles_of_a_process_share_its_gpu_and_each_rank_has_one():
    assert gpus(8, *PPO, "placement=fused") == {"actor_ref_critic_rollout": 1, "reward": 0}
    shared = gpus(8, *PPO, "fsdp.world_size=3", "placement=actor+ref,critic+reward", "rollout.num_workers=1")
    assert shared == {
        "actor_ref": 1, "actor_ref-1": 1, "actor_ref-2": 1, "critic_reward": 1, "critic-1": 1, "critic-2": 1,
        "rollout-0": 1,
    }  # fmt: skip


def test_a_replica_of_vllm_has_a_gpu_for_each_of_its_processes_and_shares_none():
    two = ("rollout.tensor_model_parallel_size=2", "rollout.num_workers=2")
    planned = gpus(5, FSDP, VLLM, "placement=actor+ref", *two)
    assert planned == {"actor_ref": 1, "rollout-0": 2, "rollout-1": 2, "reward": 0}


@pytest.mark.parametrize(
    ("size", "lenders"),
    [
        (1, [("actor_ref",), ("actor_ref-1",), ("actor_ref-2",), ("actor_ref-3",)]),
        (2, [("actor_ref", "actor_ref-1"), ("actor_ref-2", "actor_ref-3")]),
    ],
)
def test_replicas_that_share_the_gpus_of_the_actor_reserve_none(size, lenders):
    config = load_config(
        [FSDP, VLLM, KL, "fsdp.world_size=4", "rollout.share_gpus=true", f"rollout.tensor_model_parallel_size={size}"]
    )
    planned = plan_processes(config, 4)
    assert {process.name: process.gpus for process in planned} == {
        "actor_ref": 1, "actor_ref-1": 1, "actor_ref-2": 1, "actor_ref-3": 1, "reward": 0,
        **{f"rollout-{i}": 0 for i in range(len(lenders))},
    }  # fmt: skip
    assert [process.lenders for process in planned if process.roles == ("rollout",)] == lenders
    assert not any(process.lenders for process in planned if process.roles != ("rollout",))
    assert f"actor_ref-3 1, rollout-0 those of {' and '.join(lenders[0])}, rollout-1 those" in described_gpus(planned)


def test_a_replica_can_share_no_gpu_where_there_is_none():
    with pytest.raises(ConfigError, match=r"rollout\.name=vllm needs 1 GPU for each process of rollout"):
        gpus(0, FSDP, VLLM, "rollout.share_gpus=true")


def test_a_reward_model_has_a_gpu_unless_its_file_says_cpu(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    judge = tmp_path / "judge.toml"
    for device, expected in (("auto", 1), ("cuda", 1), ("cpu", 0)):
        judge.write_text(f'kind = "model"\npath = "{tmp_path}"\ndevice = "{device}"\n')
        trust(judge)
        assert gpus(2, f"reward.function={judge}", "placement=fused")["reward"] == expected
    judge.write_text(f'kind = "model"\npath = "{tmp_path}"\ndevice = "cuda"\n')
    trust(judge)
    with pytest.raises(ConfigError, match=r'device = "cuda" of .*judge\.toml in reward\.function needs 1 GPU for'):
        gpus(0, f"reward.function={judge}")


@pytest.mark.parametrize(
    ("found", "overrides", "words"),
    [
        (2, ["fsdp.world_size=3", "rollout.device=cpu"], r"need 3 .*actor_ref.* and 2 can .*for actor_\w+-2\. Lower fsdp\.world_size, or set"),
        (1, ["placement=separate", "rollout.device=cpu", KL], r"need 2 GPUs .*\(actor 1, ref 1\).* for ref\. Set placement=actor\+ref\+critic"),
        (2, ["placement=separate"], r"need 4 GPUs .* for rollout-0\. Lower rollout\.num_workers or set rollout\.device=cpu, or set trainer"),
        (0, ["rollout.device=cuda"], r"rollout\.device=cuda needs 1 GPU for each process of rollout, and Ray has none"),
        (3, [VLLM, "rollout.tensor_model_parallel_size=2"], r"left for rollout-0\. Lower rollout\.num_workers or rollout\.\w+\.$"),
        (4, ["fsdp.world_size=4", "trainer.n_gpus_per_node=3"], r"3 can be used on this one \(trainer\.n_gpus_per_node\)"),
        (4, ["trainer.n_gpus_per_node=5"], r"trainer\.n_gpus_per_node=5, but Ray has 4 GPUs on this node"),
        (4, ["trainer.n_gpus_per_node=0", "fsdp.device=cuda"], r"fsdp\.device=cuda needs 1 GPU for .* trainer\.n_gpus_per_node=0 leaves none"),
        (4, ["trainer.n_gpus_per_node=0", "model_engine=torch", "torch.device=cuda"], r"torch\.device=cuda needs 1 GPU for"),
        (0, [VLLM], r"rollout\.name=vllm needs 1 GPU for each process of rollout, and Ray has none on this node"),
    ],
)  # fmt: skip
def test_too_few_gpus_are_refused_with_the_role_that_lacks_them_and_the_key(found, overrides, words):
    with pytest.raises(ConfigError, match=words):
        gpus(found, FSDP, *overrides)


def test_the_ranks_of_megatron_are_lowered_by_the_key_that_sets_them():
    sizes = ("model_engine=megatron", "megatron.tensor_model_parallel_size=4")
    with pytest.raises(ConfigError, match=r"Lower megatron\.tensor_model_parallel_size"):
        gpus(2, *sizes)
    with pytest.raises(ConfigError, match=r"Lower megatron\.world_size"):
        gpus(2, *sizes, "megatron.world_size=8")


def test_gpus_of_which_the_run_may_use_none_leave_everything_on_the_cpu():
    assert set(gpus(8, *PPO, "trainer.n_gpus_per_node=0").values()) == {0}


@pytest.mark.parametrize(
    ("overrides", "found", "warning"),
    [
        (["model_engine=torch"], 0, ""),
        (
            ["model_engine=torch", "torch.device=cpu", "rollout.device=cpu"],
            2,
            "while 2 GPUs of this node stand idle; set torch.device=auto",
        ),
        ([FSDP, "fsdp.device=cpu", "rollout.device=cpu"], 2, "stand idle; set fsdp.device=auto"),
        ([FSDP], 2, ""),
        (["model_engine=torch", "trainer.n_gpus_per_node=0"], 2, ""),
        (["model_engine=torch", "torch.device=cpu", VLLM, "rollout.num_workers=2"], 2, ""),
    ],
)
def test_training_on_the_cpu_while_a_gpu_stands_idle_is_said(overrides, found, warning):
    config = load_config(overrides)
    said = idle_gpus(config, plan_processes(config, found), found)
    assert warning in said
    assert bool(said) == bool(warning)
