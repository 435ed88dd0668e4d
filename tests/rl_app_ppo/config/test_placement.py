"""Which roles share a process, and which settings that excludes."""

from __future__ import annotations

import pytest

from rl_app_ppo.api.banner import described
from rl_app_ppo.checks.memory import needed_bytes
from rl_app_ppo.cli.explain import explain
from rl_app_ppo.config.loading import load_config, resolve
from rl_app_ppo.config.placement import parse_placement, shares_weights, worker_groups
from rl_protocol import ConfigError


def processes(*overrides):
    groups = worker_groups(load_config(overrides))
    return {group.process_name(rank): group.roles_of(rank) for group in groups for rank in range(group.ranks)}


SEPARATE = "placement=separate"


def test_with_separate_every_role_and_replica_has_a_process():
    assert processes(SEPARATE, "algorithm=ppo", "actor.use_kl_loss=true") == {
        "actor": ("actor",),
        "ref": ("ref",),
        "critic": ("critic",),
        "rollout-0": ("rollout",),
        "rollout-1": ("rollout",),
        "reward": ("reward",),
    }
    assert processes(SEPARATE, "actor.use_kl_loss=false", "rollout.num_workers=1").keys() == {
        "actor",
        "rollout-0",
        "reward",
    }
    assert "ref" not in processes(SEPARATE, "lora.rank=4")  # the actor without its adapter


@pytest.mark.parametrize(
    ("overrides", "chosen", "origin"),
    [
        ([], "fused", "placement=auto with one actor rank and rollout.name=hf"),
        (
            ["placement=auto", "rollout.num_workers=1"],
            "fused",
            "placement=auto with one actor rank and rollout.name=hf",
        ),
        (["model_engine=fsdp"], "fused", "placement=auto with one actor rank and rollout.name=hf"),
        (
            ["model_engine=fsdp", "fsdp.world_size=2"],
            "fused",
            "placement=auto with 2 actor ranks and rollout.name=hf",
        ),
        (
            ["model_engine=megatron", "megatron.tensor_model_parallel_size=2"],
            "fused",
            "placement=auto with 2 actor ranks and rollout.name=hf",
        ),
        (
            ["model_engine=megatron", "megatron.world_size=4"],
            "actor+ref+critic",
            "placement=auto with 4 actor ranks, more than rollout replicas",
        ),
        (
            ["model_engine=fsdp", "fsdp.world_size=4", "rollout.num_workers=4"],
            "fused",
            "placement=auto with 4 actor ranks and rollout.name=hf",
        ),
        (
            ["model_engine=fsdp", "fsdp.world_size=2", "rollout.num_workers=1"],
            "separate",
            "placement=auto with rollout.num_workers=1",
        ),
        (["rollout.num_workers=3"], "separate", "placement=auto with rollout.num_workers=3"),
        (["rollout.name=vllm"], "separate", "placement=auto with rollout.name=vllm"),
        (["checkpoint_engine.backend=tcp"], "separate", "placement=auto with checkpoint_engine.backend=tcp"),
        (["async_rl.max_staleness=1"], "separate", "placement=auto with async_rl.max_staleness=1"),
        (["placement=actor+ref"], "actor+ref", "command line"),
    ],
)
def test_auto_is_fused_unless_more_processes_are_asked_for_or_save_copies(overrides, chosen, origin):
    setting = resolve(overrides).settings["placement"]
    assert (setting.value, setting.origin) == ((chosen,), origin)


def test_a_placement_is_a_list():
    for written in ("[actor+ref,critic+reward]", "actor+ref,critic+reward"):
        assert load_config([f"placement={written}", "algorithm=ppo"]).placement == ("actor+ref", "critic+reward")


def test_fused_puts_all_models_into_one_process():
    assert processes("placement=fused") == {"actor_ref_rollout": ("actor", "ref", "rollout"), "reward": ("reward",)}
    assert processes("placement=fused", "algorithm=ppo", "actor.use_kl_loss=false") == {
        "actor_critic_rollout": ("actor", "critic", "rollout"),
        "reward": ("reward",),
    }


def test_groups_can_be_named_and_each_rank_has_a_process():
    two = ("model_engine=fsdp", "fsdp.world_size=2", "fsdp.device=cpu", "algorithm=ppo", "rollout.num_workers=1")
    assert processes("placement=ref+actor", "actor.use_kl_loss=true", *two) == {
        "actor_ref": ("actor", "ref"),
        "actor_ref-1": ("actor", "ref"),
        "critic": ("critic",),
        "critic-1": ("critic",),
        "rollout-0": ("rollout",),
        "reward": ("reward",),
    }
    assert processes("placement=actor+rollout, critic+reward", "algorithm=ppo", "actor.use_kl_loss=false") == {
        "actor_rollout": ("actor", "rollout"),
        "critic_reward": ("critic", "reward"),
    }


@pytest.mark.parametrize(
    ("engine", "ranks"),
    [
        (["model_engine=fsdp", "fsdp.world_size=2"], 2),
        (["model_engine=megatron", "megatron.tensor_model_parallel_size=2"], 2),
        (["model_engine=megatron", "megatron.world_size=4"], 4),
        (["model_engine=megatron"], 1),
    ],
)
def test_every_rank_of_the_actor_has_a_rollout_in_its_process(engine, ranks):
    asked = ["placement=fused", "algorithm=ppo", "actor.use_kl_loss=true", *engine]
    config = load_config(asked)
    names = ["actor_ref_critic_rollout", *(f"actor_ref_critic_rollout-{rank}" for rank in range(1, ranks))]
    assert processes(*asked) == {
        **dict.fromkeys(names, ("actor", "ref", "critic", "rollout")),
        "reward": ("reward",),
    }
    assert (config.rollout.num_workers, config.checkpoint_engine.backend) == (ranks, "naive")
    assert not shares_weights(config), "the ranks gather a copy"
    beside = load_config(["placement=actor+ref+critic", *asked[1:]])
    assert {len(group.roles) for group in worker_groups(beside)} == {3, 1}


def test_auto_takes_as_many_processes_as_ranks_and_as_many_copies_as_separate():
    two = ("model_engine=fsdp", "fsdp.world_size=2", "fsdp.device=cpu", "actor.use_kl_loss=true")
    assert processes(*two).keys() == {"actor_ref_rollout", "actor_ref_rollout-1", "reward"}
    four = ("model_engine=fsdp", "fsdp.world_size=4", "fsdp.device=cpu", "actor.use_kl_loss=true")
    trained = {"actor_ref", *(f"actor_ref-{rank}" for rank in range(1, 4))}
    assert processes(*four).keys() == trained | {"rollout-0", "rollout-1", "reward"}
    for chosen in (two, four):
        least = needed_bytes(1000, 1000, load_config([*chosen, SEPARATE]))
        assert needed_bytes(1000, 1000, load_config([*chosen])) == least
    assert needed_bytes(1000, 1000, load_config([*four, "placement=fused"]))["rollout"] == 2 * least["rollout"]


def test_the_reward_beside_several_ranks_is_in_the_first_process():
    asked = ["model_engine=fsdp", "fsdp.world_size=2", "fsdp.device=cpu", "placement=actor+reward"]
    assert processes(*asked, "actor.use_kl_loss=false", "rollout.num_workers=1") == {
        "actor_reward": ("actor", "reward"),
        "actor-1": ("actor",),
        "rollout-0": ("rollout",),
    }
    line = "here actor+reward (reward in the first) in 2 processes, rollout in 2; rollout gets the weights through shm"
    assert f"    {line}\n" in explain("placement", resolve([*asked, "actor.use_kl_loss=false"]))


def test_ranks_that_another_key_gives_are_counted_as_well(tmp_path):
    file = tmp_path / "ranks.yaml"
    file.write_text("model_engine: fsdp\nfsdp: {world_size: '2'}\n")
    assert resolve(["placement=fused"], file).config.rollout.num_workers == 2
    with pytest.raises(ConfigError, match=r"fsdp\.world_size must be of type int; got 'two'"):
        load_config(["placement=fused", "model_engine=fsdp", "fsdp.world_size=two"])


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["async_rl.max_staleness=1"],
            r"generates while the models train, so replicas can't free their memory meanwhile; set rollout\.free_cache_engine=false",
        ),
        (["checkpoint_engine.enabled=false"], r"set checkpoint_engine\.enabled=true, or rollout\.free_cache_engine"),
    ],
)
def test_memory_is_not_freed_under_running_generation_nor_without_a_manager(overrides, words):
    assert not load_config(overrides).rollout.free_cache_engine
    with pytest.raises(ConfigError, match=words):
        load_config(["rollout.free_cache_engine=true", *overrides])


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            [],
            "here actor+ref+rollout in 1 process, reward in 1; rollout computes with the actor's own weights (on a GPU: with a copy)",
        ),
        (
            ["placement=fused", "model_engine=fsdp", "fsdp.world_size=2"],
            "here actor+ref+rollout in 2 processes, reward in 1; rollout gets a copy of the weights in its process",
        ),
        (
            [SEPARATE],
            "here actor in 1 process, ref in 1, rollout in 2, reward in 1; rollout gets the weights through shm",
        ),
    ],
)
def test_explain_says_which_processes_the_placement_makes_and_how_weights_travel(overrides, line):
    resolved = resolve(["actor.use_kl_loss=true", *overrides])
    assert f"    {line}\n" in explain("placement", resolved)


def test_a_rollout_in_the_actors_process_is_one_and_gets_its_weights_there():
    resolved = resolve(["placement=fused"])
    for key, value in {"rollout.num_workers": 1, "checkpoint_engine.backend": "naive"}.items():
        setting = resolved.settings[key]
        assert (setting.value, setting.origin) == (value, "default of placement=fused")
    apart = resolve(["placement=actor+ref"]).settings
    assert (apart["rollout.num_workers"].value, apart["checkpoint_engine.backend"].value) == (2, "shm")


@pytest.mark.parametrize(
    ("placement", "words"),
    [
        (
            "together",
            r"placement must be auto, separate, fused, or groups .* got 'together', and 'together' is none of actor",
        ),
        ("actor+judge", r"'judge' is none of actor, ref, critic, rollout, reward"),
        ("actor+ref,ref+critic", r"placement must name each role once; .* names ref twice"),
    ],
)
def test_other_placements_are_refused(placement, words):
    with pytest.raises(ConfigError, match=words):
        parse_placement([placement])
    with pytest.raises(ConfigError, match=words):
        load_config([f"placement={placement}"])


def test_lists_in_the_placement_are_refused():
    with pytest.raises(ConfigError, match=r"placement must be auto, .* is none of actor, ref, critic, rollout, reward"):
        load_config(["placement=[[actor,ref],[rollout]]"])


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["rollout.num_workers=2"],
            r"puts actor and ref and rollout into one process, .*rollout\.num_workers must be 1",
        ),
        (
            ["rollout.name=vllm"],
            r"rollout\.name=vllm needs its worker's process alone\. Set rollout\.name=hf, or a placement",
        ),
        (["checkpoint_engine.backend=shm"], r"checkpoint_engine\.backend must be naive; got shm"),
        (
            ["model_engine=fsdp", "fsdp.world_size=3", "rollout.num_workers=2"],
            r"puts actor and ref and rollout into one process, .*rollout\.num_workers must be 3; got 2",
        ),
        (
            ["model_engine=fsdp", "fsdp.world_size=2", "placement=fused,critic+reward", "algorithm=ppo"],
            r"names critic twice",
        ),
    ],
)
def test_what_does_not_work_in_one_process_is_refused_by_name(overrides, words):
    with pytest.raises(ConfigError, match=words):
        load_config(["placement=fused", *overrides])


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["placement=fused"],
            r"max_staleness=1 .*puts actor and ref and rollout into one process.* set placement=separate",
        ),
        (["placement=rollout+reward", "rollout.num_workers=1"], r"puts rollout and reward into one process"),
        (["checkpoint_engine.enabled=false"], r"set checkpoint_engine\.enabled=true, or async_rl\.max_staleness=0"),
        (["actor.policy_loss.loss_mode=gpg"], r"loss_mode=gpg has neither"),
    ],
)
def test_what_can_not_run_beside_generation_is_refused_by_name(overrides, words):
    load_config(overrides)
    with pytest.raises(ConfigError, match=words):
        load_config(["async_rl.max_staleness=1", *overrides])


def test_a_deterministic_run_recomputes_its_old_log_probs_and_says_who_set_that():
    given = ["placement=separate", "trainer.threads_per_worker=1"]
    assert load_config(given).algorithm.old_log_prob == "auto"
    setting = resolve([*given, "trainer.deterministic=true"]).settings["algorithm.old_log_prob"]
    assert (setting.value, setting.origin) == ("recompute", "trainer.deterministic=true")
    load_config([*given, "trainer.deterministic=true", "algorithm.old_log_prob=recompute"])
    assert resolve([*given, "trainer.deterministic=false"]).config.algorithm.old_log_prob == "auto"


def test_interpolated_log_probs_weigh_the_ratio_unless_told_otherwise():
    key, given = "algorithm.rollout_correction.rollout_is", ["async_rl.max_staleness=2"]
    setting = resolve([*given, "algorithm.old_log_prob=interpolate"]).settings[key]
    assert (setting.value, setting.origin) == ("token", "algorithm.old_log_prob=interpolate")
    assert resolve([*given, "algorithm.old_log_prob=interpolate", f"{key}="]).settings[key].value == ""
    assert resolve([*given, "algorithm.old_log_prob=recompute"]).settings[key].value == ""
    with pytest.raises(ConfigError, match=r"algorithm\.old_log_prob=interpolate .* async_rl\.max_staleness=0 excludes"):
        load_config(["algorithm.old_log_prob=interpolate"])


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["rollout.name=vllm"], r"rollout\.name must be hf with trainer\.deterministic=true"),
        (
            ["async_rl.max_staleness=1", "async_rl.on_update=continue"],
            r"async_rl\.on_update must be finish with trainer\.deterministic=true: .*; got 'continue'",
        ),
        (
            ["async_rl.max_staleness=1", "async_rl.order=ready_first", "async_rl.when_stale=drop"],
            r"async_rl\.order must be in_order with trainer\.deterministic=true: which groups .* delays; got 'ready_first'",
        ),
        (["async_rl.max_staleness=1", "async_rl.on_update=abort"], r"async_rl\.on_update must be finish with"),
        (
            ["trainer.threads_per_worker=0"],
            r"trainer\.threads_per_worker must be at least 1 with trainer\.deterministic",
        ),
        (["algorithm.old_log_prob=auto"], r"algorithm\.old_log_prob must be recompute with trainer\.deterministic"),
        (["algorithm.old_log_prob=rollout"], r"algorithm\.old_log_prob must be recompute with trainer\.deterministic"),
        (
            ["algorithm.old_log_prob=interpolate", "async_rl.max_staleness=2"],
            r"algorithm\.old_log_prob must be recompute with trainer\.deterministic",
        ),
    ],
)
def test_what_depends_on_timing_is_refused_in_a_deterministic_run(overrides, words):
    given = ["placement=separate", "trainer.threads_per_worker=1", *overrides]
    load_config(given)
    with pytest.raises(ConfigError, match=words):
        load_config([*given, "trainer.deterministic=true"])


def test_memory_counts_the_weights_of_a_group_once():
    apart = needed_bytes(1000, 1000, load_config([SEPARATE, "rollout.num_workers=1"]))
    fused = needed_bytes(1000, 1000, load_config(["placement=fused"]))
    assert apart.keys() - fused.keys() == {"rollout", "weight sync"}
    assert fused == {role: size for role, size in apart.items() if role in fused}
    copied = load_config(["placement=fused", "rollout.dtype=bfloat16"])
    assert not shares_weights(copied)
    assert needed_bytes(1000, 1000, copied).keys() == apart.keys()


def test_memory_counts_the_base_of_adapters_once():
    assert needed_bytes(1000, 0, load_config(["placement=fused", "lora.rank=4"])) == {"actor": 4000, "rollout": 4000}


def test_the_banner_names_the_placement_and_the_roles_that_share_a_process():
    workers = described(load_config(["placement=auto"]))["workers"]
    together = "placement fused (in one process: actor+ref+rollout)"
    assert workers == f"1 rollout, reward, actor, reference; {together}; Ray (local)"
    groups = described(load_config(["placement=actor+ref,critic+reward", "algorithm=ppo"]))["workers"]
    assert "; placement actor+ref,critic+reward (in one process: actor+ref, critic+reward); " in groups
    assert described(load_config([SEPARATE]))["workers"].endswith("; placement separate; Ray (local)")


SHARED = ("model_engine=fsdp", "fsdp.world_size=4", "rollout.name=vllm", "rollout.share_gpus=true")


def test_replicas_that_share_gpus_sleep_and_take_half_of_their_memory():
    config = load_config([*SHARED, "rollout.tensor_model_parallel_size=2"])
    rollout = config.rollout
    assert (rollout.num_workers, rollout.free_cache_engine, rollout.gpu_memory_utilization) == (2, True, 0.5)
    assert config.placement == ("actor+ref+critic",)
    assert load_config([*SHARED, "rollout.gpu_memory_utilization=0.7"]).rollout.gpu_memory_utilization == 0.7


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["fsdp.device=cpu"], r"shares the GPUs of the actor, which trains on the CPU \(fsdp\.device=cpu\)"),
        (["rollout.free_cache_engine=false"], r"needs rollout\.free_cache_engine=true"),
        (["rollout.num_workers=3"], r"of rollout\.tensor_model_parallel_size=1 of the 4 ranks .*num_workers=3 does not fit.* product is 4"),
        (["rollout.tensor_model_parallel_size=3"], r"tensor_model_parallel_size=3 .*num_workers=1 does not fit"),
        (["async_rl.max_staleness=1"], r"replicas can't free their memory meanwhile"),
        (["rollout.name=hf"], r"rollout\.share_gpus"),
        (["checkpoint_engine.backend=delta-nccl"], r"NCCL refuses in one group; set checkpoint_engine\.backend=shm, or tcp .*; got delta-nccl"),
    ],
)  # fmt: skip
def test_gpus_are_shared_only_by_replicas_that_fit_and_give_memory_back(overrides, words):
    with pytest.raises(ConfigError, match=words):
        load_config([*SHARED, *overrides])


@pytest.mark.parametrize(
    ("overrides", "engine"),
    [
        (["placement=separate"], "shm"),
        (["placement=separate", "trainer.nnodes=2"], "tcp"),
        (["placement=separate", "trainer.nnodes=2", "checkpoint_engine.backend=disk"], "disk"),
        (["model_engine=fsdp", "fsdp.world_size=2", "placement=fused", "trainer.nnodes=2"], "naive"),
    ],
)
def test_with_several_hosts_weights_reach_all_of_them_by_default(overrides, engine):
    assert load_config(overrides).checkpoint_engine.backend == engine


def test_a_text_of_a_file_means_what_it_means_elsewhere(tmp_path):
    file = tmp_path / "quoted.yaml"
    file.write_text("rollout: {share_gpus: 'false', tensor_model_parallel_size: '2'}\n")
    rollout = resolve(["rollout.name=vllm"], file).config.rollout
    assert (rollout.share_gpus, rollout.free_cache_engine, rollout.tensor_model_parallel_size) == (False, False, 2)
    with pytest.raises(ConfigError, match=r"rollout\.tensor_model_parallel_size must be of type int; got 'two'"):
        load_config([*SHARED, "rollout.tensor_model_parallel_size=two"])
