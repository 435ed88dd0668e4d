"""--from-verl keeps the meaning of a verl file, and reports what it can't convert."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from rl_app_ppo.cli.main import main
from rl_app_ppo.config.loading import load_config, resolve
from rl_app_ppo.verl_import.convert import from_verl, import_verl
from rl_app_ppo.verl_import.reading import read_verl
from rl_protocol import ConfigError

GSM8K = r"""
set -x

gsm8k_train_path=$HOME/data/gsm8k/train.parquet

python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files=$gsm8k_train_path \
    data.val_files=$HOME/data/gsm8k/test.parquet \
    data.train_batch_size=1024 data.max_prompt_length=512 data.max_response_length=1024 \
    data.filter_overlong_prompts=True data.truncation='error' \
    actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct \
    actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.model.use_remove_padding=True \
    actor_rollout_ref.actor.ppo_mini_batch_size=256 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=40 \
    actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.001 \
    actor_rollout_ref.actor.kl_loss_type=low_var_kl actor_rollout_ref.actor.entropy_coeff=0 \
    actor_rollout_ref.model.enable_gradient_checkpointing=True \
    actor_rollout_ref.actor.fsdp_config.param_offload=False \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=40 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 actor_rollout_ref.rollout.n=5 \
    actor_rollout_ref.ref.fsdp_config.param_offload=True \
    algorithm.use_kl_in_reward=False trainer.critic_warmup=0 trainer.logger='["console","wandb"]' \
    trainer.project_name='verl_grpo_example_gsm8k' trainer.experiment_name='qwen2_7b_function_rm' \
    trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.save_freq=20 trainer.test_freq=5 trainer.total_epochs=15 $@
"""
"""verl's example of GRPO on GSM8K: names and values."""
MULTI_TURN = "actor_rollout_ref.rollout.multi_turn.enable"
CRITIC_LORA = "actor_rollout_ref.model.lora_rank=4 critic.model.lora_rank=4"


@pytest.fixture
def convert(tmp_path, capsys):
    """Text of a verl file -> (exit code, comments, printed settings as nested dicts)."""

    def run(text, *flags, name="verl.txt"):
        (tmp_path / name).write_text(text)
        code = main(["--from-verl", str(tmp_path / name), *flags])
        out = capsys.readouterr().out
        (tmp_path / "ours.yaml").write_text(out)
        return code, [line for line in out.splitlines() if line.startswith("#")], yaml.safe_load(out)

    return run


@pytest.fixture
def accepted(convert, tmp_path):
    """Text of a verl file -> the configuration in the output; fails if a setting is lost."""

    def run(text, **names):
        code, comments, _ = convert(text, **names)
        assert code == 0, comments
        return load_config([], tmp_path / "ours.yaml")

    return run


@pytest.fixture
def imported(tmp_path):
    """Text of a verl file -> the result of the import, by key."""

    def run(text):
        (tmp_path / "verl.txt").write_text(text)
        return import_verl(read_verl(tmp_path / "verl.txt"))

    return run


def found(tmp_path):
    return {key: setting.value for key, setting in resolve([], tmp_path / "ours.yaml").settings.items()}


def test_the_example_of_gsm8k_loses_nothing_and_is_accepted(accepted, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    config = accepted(GSM8K, name="run.sh")
    assert config.data.train_files == ("/home/me/data/gsm8k/train.parquet",)
    assert config.reward.function == "by_data_source"  # scores openai/gsm8k as verl does
    assert (config.trainer.total_epochs, config.trainer.total_training_steps) == (15, -1)
    assert (config.actor.optim.lr, config.actor.ppo_mini_batch_size, config.rollout.n) == (1e-6, 256, 5)
    assert (config.actor.use_kl_loss, config.actor.kl_loss_type, config.actor.clip_ratio_high) == (
        True,
        "low_var_kl",
        0.2,
    )
    assert (config.rollout.name, config.rollout.dtype, config.rollout.response_length) == ("vllm", "bfloat16", 1024)
    assert config.rollout.gpu_memory_utilization == 0.6
    assert (config.trainer.run_name, config.trainer.output_dir) == (
        "qwen2_7b_function_rm",
        "checkpoints/verl_grpo_example_gsm8k",
    )
    assert (config.trainer.save_freq, config.trainer.test_freq, config.trainer.logger) == (20, 5, ("console", "wandb"))


def test_a_tool_agent_keeps_its_limits_and_dialect(imported):
    group = "actor_rollout_ref.rollout.multi_turn"
    text = f"{group}.enable=True {group}.format=llama3_json {group}.max_assistant_turns=5 {group}.max_tool_response_length=99"
    found = imported(text)
    settings = {
        key: value for key, value in found.settings.items() if key.startswith(("rollout.agent", "rollout.session"))
    }
    assert settings == {
        "rollout.session": "tool_agent",
        "rollout.agent.dialect": "llama3_json",
        "rollout.agent.turns": 5,
        "rollout.agent.answer_chars": 99,
    }
    assert (
        imported("actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent").settings["rollout.session"]
        == "tool_agent"
    )


def test_the_report_names_the_reward_the_devices_and_what_has_no_effect(convert):
    _, comments, _ = convert(GSM8K.replace("$HOME", "/h").replace("nnodes=1", "nnodes=2"))
    assert not any(line.startswith("# lost") for line in comments)
    notes = "\n".join(comments)
    assert "# note: reward.function=by_data_source: the data_source of each row chooses the reward" in notes
    assert (
        "trainer.n_gpus_per_node=8: fsdp.world_size is the number of processes that share each model; set it to 16"
        in notes
    )


@pytest.mark.parametrize("engine", ["", "model_engine=megatron"])
def test_verls_defaults_are_accepted(accepted, engine):
    config = accepted(engine)
    assert config.model_engine == ("megatron" if engine else "fsdp")
    assert (config.actor.optim.lr, config.critic.optim.lr, config.actor.optim.beta2) == (1e-6, 1e-5, 0.999)
    assert (config.rollout.n, config.data.train_batch_size, config.algorithm.adv_estimator) == (1, 1024, "gae")
    assert config.actor.ppo_mini_batch_size == config.critic.ppo_mini_batch_size == 256
    assert (config.actor.clip_ratio_high, config.actor.use_kl_loss, config.actor.optim.weight_decay) == (
        0.2,
        False,
        0.01,
    )
    assert (config.trainer.total_epochs, config.trainer.total_training_steps, config.trainer.test_freq) == (30, -1, 0)
    assert (config.trainer.resume_mode, config.trainer.run_name) == ("auto", "gsm8k")


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_no_setting_of_an_algorithm_of_ours_stands_in_for_verls(algorithm):
    changed = resolve([f"algorithm={algorithm}", "preset=none"]).settings
    ours = {key for key, setting in changed.items() if setting.origin.startswith("algorithm=")}
    assert ours - {"algorithm.name"} <= import_verl({}).settings.keys()


# -- what is lost, and what is only noted
@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("actor_rollout_ref.actor.optim.lr_scheduler_type=cosine", r"computes its end from the size of the data"),
        ("actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.1", r"computes the steps from the size of the data"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=bypass_mode", "bypass_mode is not supported"),
        ("actor_rollout_ref.actor.kl_loss_type=full", "full is not supported"),
        ("actor_rollout_ref.actor.strategy=veomni", "veomni is not supported"),
        ("algorithm.adv_estimator=mine", "mine is not supported"),
        ("algorithm.use_pf_ppo=True", "not weighted"),
        ("+algorithm.my_trick=1", "no such key in verl 0.9.1"),
        ("+actor_rollout_ref.actor.optim.override_optimizer_config.foreach=True", "AdamW has no such setting"),
        ("actor_rollout_ref.actor.optim.optimizer=SGD", "AdamW is the optimizer"),
        ("actor_rollout_ref.rollout.agent.default_agent_loop=mine", "set rollout.session to a session"),
        ("actor_rollout_ref.rollout.multi_turn.tool_config_path=tools.yaml", "register each tool as a ToolKind"),
        (f"{MULTI_TURN}=True {MULTI_TURN[:-6]}max_parallel_calls=4", "all calls of a turn are made"),
        (f"{MULTI_TURN}=True {MULTI_TURN[:-6]}format=gemma4", "gemma4 is not supported"),
        ("actor_rollout_ref.rollout.do_sample=False", "greedy samples"),
        ("actor_rollout_ref.actor.qat.enable=True", "not quantized"),
        ("distillation.enabled=True", "reference.path with algorithm=opd"),
        ("reward.reward_model.enable=True", "reward model"),
        ("data.truncation=left", "prompts are not cut"),
        ("data.train_max_samples=100", "give a shorter file"),
        ("data.apply_chat_template_kwargs.enable_thinking=False", "chat template"),
        ("trainer.v1.trainer_mode=colocate_async", "needs processes of its own"),
        ("trainer.resume_mode=resume_path trainer.resume_from_path=/x/global_step_3", "can't be resumed here"),
        ("critic.model.path=/another/model", "the critic starts from"),
        (f"{CRITIC_LORA} critic.model.lora_alpha=8", "and actor_rollout_ref.model.lora_alpha is 16"),
        (
            f"{CRITIC_LORA} critic.model.target_modules=[q_proj]",
            "and actor_rollout_ref.model.target_modules is all-linear",
        ),
        (
            "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm actor_rollout_ref.actor.loss_scale_factor=9",
            "the critic has",
        ),
    ],
)
def test_what_changes_learning_and_has_no_counterpart_is_a_loss(imported, text, line):
    ((_, why),) = imported(text).lost.items()
    assert line in why


def test_losses_are_counted_on_the_error_stream(tmp_path, capsys):
    (tmp_path / "verl.txt").write_text("distillation.enabled=True data.tokenizer=x")
    assert main(["--from-verl", str(tmp_path / "verl.txt")]) == 1
    out, err = capsys.readouterr()
    assert err.startswith("lost values that change the result of training: 2")
    assert out.count("# lost: ") == 2
    assert main(["--from-verl", str(tmp_path / "verl.txt"), "--accept-losses"]) == 0
    assert capsys.readouterr().out == out


def test_asynchronous_training_keeps_its_bound_and_runs_as_far_ahead(convert):
    text = "\n".join(
        f"trainer.v1.{key}"
        for key in (
            "trainer_mode=separate_async",
            "sampler.max_off_policy_threshold=4",
            "separate_async.num_warmup_batches=2",
            "separate_async.hybrid_rollout.enable_switch=True",
        )
    )
    code, comments, settings = convert(GSM8K + "\n" + text, name="run.txt")
    asynchronous = settings["async_rl"]
    assert [asynchronous[name] for name in ("max_staleness", "depth", "on_update")] == [4, 2, "continue"]
    assert (asynchronous["order"], asynchronous["when_stale"]) == ("ready_first", "drop")  # verl's default
    assert any("new weights continue the responses" in line for line in comments)
    assert code == 0, comments
    waits = GSM8K + "\n" + text + "\ntrainer.v1.sampler.max_off_policy_strategy=wait"
    _, _, settings = convert(waits, name="waits.txt")
    assert settings["async_rl"]["order"] == "ready_first"
    assert settings["async_rl"].get("when_stale", "wait") == "wait"


def test_the_older_asynchronous_trainer_keeps_its_partial_rollout_and_loses_its_ratio(imported):
    found = imported("async_training.staleness_threshold=0.5 async_training.partial_rollout=True")
    assert found.settings["async_rl.on_update"] == "continue"
    ((key, why),) = found.lost.items()
    assert key == "async_training.staleness_threshold=0.5"
    assert "set async_rl.max_staleness, in versions of the weights" in why


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("actor_rollout_ref.actor.clip_ratio=0.3", "clip_ratio alone has no effect there"),
        ("actor_rollout_ref.actor.grad_clip=0.5", "verl's engines read actor_rollout_ref.actor.optim.clip_grad"),
        ("actor_rollout_ref.actor.optim.total_training_steps=9", "verl replaces it by the length of the run"),
        (
            "reward.reward_kwargs.overlong_buffer_cfg.len=4",
            "does not read it without reward.reward_kwargs.overlong_buffer_cfg.enable=true",
        ),
        ("algorithm.adv_estimator=grpo critic.model.path=/another/model", "there is no critic"),
        ("critic.model.lora_alpha=8", "the critic has no such adapters"),
        ("critic.use_dynamic_bsz=True critic.ppo_micro_batch_size_per_gpu=4", "use_dynamic_bsz=true"),
        ("distillation.distillation_loss.topk=8", "does not read it without distillation.enabled=true"),
        ("actor_rollout_ref.rollout.name=sglang", "vllm generates instead"),
        ("actor_rollout_ref.rollout.checkpoint_engine.backend=kimi_ckpt_engine", "keeps its default"),
        ("transfer_queue.backend.SimpleStorage.total_storage_size=5", "transfer_queue.capacity_mb"),
        ("trainer.logger=[console,swanlab]", "there is no logger swanlab"),
        ("trainer.project_name=p", "WANDB_PROJECT"),
    ],
)
def test_what_does_not_change_learning_is_a_note(imported, text, line):
    found = imported(text)
    assert found.lost == {}
    assert any(line in f"{key}: {why}" for key, why in found.notes.items()), found.notes


def test_vllm_generates_where_no_engine_is_named(imported):
    """verl 0.9 asks for a name, and scripts for earlier versions have none."""
    found = imported("actor_rollout_ref.rollout.tensor_model_parallel_size=4")
    assert (found.settings["rollout.name"], found.settings["rollout.tensor_model_parallel_size"]) == ("vllm", 4)
    assert found.notes["actor_rollout_ref.rollout.name is not given"].startswith("vllm generates")
    named = imported("actor_rollout_ref.rollout.name=hf")
    assert named.settings["rollout.name"] == "hf"
    assert not any("is not given" in key for key in named.notes)


def test_values_that_are_verls_defaults_are_not_listed(convert):
    _, bare, _ = convert("")
    _, comments, _ = convert(
        "data.truncation=error actor_rollout_ref.actor.fsdp_config.fsdp_size=-1 data.seed=null distillation.enabled=False"
    )
    assert comments == bare


# -- values that are converted
DAPO = """
algorithm.adv_estimator=grpo algorithm.use_kl_in_reward=False algorithm.filter_groups.enable=True
algorithm.filter_groups.metric=seq_reward algorithm.filter_groups.max_num_gen_batches=10
algorithm.rollout_correction.rollout_is=token algorithm.rollout_correction.rollout_is_threshold=2.0
data.train_files=train.parquet data.val_files=test.parquet data.train_batch_size=512 data.max_prompt_length=2048
data.max_response_length=8192 actor_rollout_ref.model.path=Qwen/Qwen2.5-7B
actor_rollout_ref.actor.clip_ratio_low=0.2 actor_rollout_ref.actor.clip_ratio_high=0.28
actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.actor.ppo_mini_batch_size=32
actor_rollout_ref.actor.optim.lr_warmup_steps=10 actor_rollout_ref.actor.optim.weight_decay=0.1
actor_rollout_ref.actor.optim.betas=[0.9,0.95] actor_rollout_ref.actor.optim.lr_scheduler_type=cosine
actor_rollout_ref.actor.kl_loss_type=k3+ actor_rollout_ref.actor.use_kl_loss=True
actor_rollout_ref.actor.policy_loss.loss_mode=gspo actor_rollout_ref.actor.strategy=fsdp2
actor_rollout_ref.actor.fsdp_config.dtype=bf16 actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=16
actor_rollout_ref.rollout.tensor_model_parallel_size=4 actor_rollout_ref.rollout.top_k=-1
actor_rollout_ref.rollout.top_p=0.95
actor_rollout_ref.rollout.val_kwargs.n=32 actor_rollout_ref.rollout.val_kwargs.temperature=1.0
actor_rollout_ref.rollout.val_kwargs.do_sample=True reward.reward_manager.name=dapo
+reward.reward_kwargs.overlong_buffer_cfg.enable=True +reward.reward_kwargs.overlong_buffer_cfg.len=4096
+reward.reward_kwargs.overlong_buffer_cfg.penalty_factor=0.5 +reward.reward_kwargs.max_resp_len=8192
trainer.total_training_steps=500 trainer.test_freq=10 trainer.save_freq=-1 trainer.experiment_name=dapo
"""


def test_the_loss_that_verl_got_after_0_9_1_keeps_its_weight(accepted):
    accepted("actor_rollout_ref.actor.policy_loss.loss_mode=dro +actor_rollout_ref.actor.policy_loss.dro_beta=0.05")
    loss = import_verl(
        {"actor_rollout_ref.actor.policy_loss.loss_mode": "dro", "actor_rollout_ref.actor.policy_loss.dro_beta": 0.05}
    ).settings
    assert (loss["actor.policy_loss.loss_mode"], loss["actor.policy_loss.dro_beta"]) == ("dro", 0.05)


def test_a_whole_recipe_means_here_what_it_meant_there(accepted, tmp_path):
    accepted(DAPO)
    expected = {
        "model_engine": "fsdp",
        "algorithm.filter_groups.metric": "score",
        "algorithm.filter_groups.max_num_gen_batches": 10,
        "algorithm.rollout_correction.rollout_is": "token",
        "algorithm.rollout_correction.rollout_is_threshold": "2.0",
        "data.train_batch_size": 512,
        "rollout.name": "vllm",
        "rollout.dtype": "bfloat16",
        "trainer.save_freq": 0,
        "fsdp.param_dtype": "bfloat16",
        "fsdp.activation_checkpointing": True,
        "fsdp.world_size": 1,
        "actor.clip_ratio_low": 0.2,
        "actor.clip_ratio_high": 0.28,
        "actor.ppo_micro_batch_size": 0,
        "actor.ppo_max_token_len": 16384,
        "actor.optim.lr_warmup_steps": 160,  # 10 training steps of 512 / 32 optimizer steps
        "actor.optim.lr_scheduler_type": "cosine",
        "actor.optim.lr_decay_steps": 8000,
        "actor.optim.weight_decay": 0.1,
        "actor.optim.beta2": 0.95,
        "actor.kl_loss_type": "k3+",
        "actor.policy_loss.loss_mode": "gspo",
        "rollout.top_k": 0,
        "rollout.top_p": 0.95,
        "rollout.sampling_replay": False,
        "rollout.tensor_model_parallel_size": 4,
        "rollout.val_kwargs.n": 32,
        "rollout.val_kwargs.temperature": 1.0,
        "reward.overlong.buffer_len": 4096,
        "reward.overlong.penalty_factor": 0.5,
        "reward.function": "by_data_source",
        "trainer.total_training_steps": 500,
        "trainer.total_epochs": 30,  # verl's default, which also limits the run in verl
    }
    ours = found(tmp_path)
    assert {key: ours[key] for key in expected} == expected


def test_schedules_move_once_per_training_step_there_and_per_optimizer_step_here(accepted):
    # the batch has 1024 prompts
    steps = "actor_rollout_ref.actor.ppo_mini_batch_size=256 actor_rollout_ref.actor.ppo_epochs=2 critic.ppo_epochs=1"
    config = accepted(
        f"{steps} trainer.total_training_steps=50 actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.1 critic.optim.lr_warmup_steps=3"
    )
    assert (config.actor.optim.lr_warmup_steps, config.critic.optim.lr_warmup_steps) == (5 * 4 * 2, 3 * 4)


@pytest.mark.parametrize(("verl", "ours"), [(0, 0), (1, 0), (5, 4)])
def test_the_actor_is_trained_from_the_step_that_verl_names(accepted, verl, ours):
    """verl's first step is 1."""
    assert accepted(f"algorithm.adv_estimator=gae trainer.critic_warmup={verl}").critic.warmup_steps == ours


def test_clip_ratio_holds_for_a_side_that_is_null(accepted):
    config = accepted("actor_rollout_ref.actor.clip_ratio=0.3 actor_rollout_ref.actor.clip_ratio_low=null")
    assert (config.actor.clip_ratio_low, config.actor.clip_ratio_high) == (0.3, 0.2)


def test_validation_is_greedy_without_do_sample(accepted):
    key = "actor_rollout_ref.rollout.val_kwargs"
    assert accepted(f"{key}.temperature=0.7").rollout.val_kwargs.temperature == 0.0
    assert accepted(f"{key}.temperature=0.7 {key}.do_sample=True").rollout.val_kwargs.temperature == 0.7


def test_a_reward_function_of_the_users(accepted):
    config = accepted("reward.custom_reward_function.path=my.py")
    assert config.reward.function == "my.py:compute_score"
    assert accepted("custom_reward_function.path=my.py custom_reward_function.name=f").reward.function == "my.py:f"


def test_the_critic_takes_over_what_the_actor_has(accepted):
    config = accepted("actor_rollout_ref.actor.ppo_mini_batch_size=128 actor_rollout_ref.actor.ppo_epochs=3")
    assert (config.critic.ppo_mini_batch_size, config.critic.ppo_epochs) == (128, 3)


def test_both_hooks_of_weight_synchronisation_are_carried_over(accepted):
    config = accepted(
        "actor_rollout_ref.rollout.checkpoint_engine.backend=mine "
        "actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=my_pkg.engines "
        "+actor_rollout_ref.rollout.checkpoint_manager_class=my_pkg.managers.Manager "
        "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=512 "
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=3"
    )
    sync = config.checkpoint_engine
    assert (sync.backend, sync.custom_backend_module, sync.checkpoint_manager_class) == (
        "mine",
        "my_pkg.engines",
        "my_pkg.managers.Manager",
    )
    assert (sync.bucket_mb, config.transfer_queue.num_storage_units) == (512.0, 3)


# -- LoRA, for which verl has two schemas
MODEL = "actor_rollout_ref.model"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{MODEL}.lora_rank=8", (8, 16.0, ("all-linear",))),  # the defaults of each schema
        (
            f"{MODEL}.lora.rank=8 {MODEL}.lora.target_modules=[linear_qkv,linear_fc2]",
            (8, 32.0, ("q_proj", "k_proj", "v_proj", "down_proj")),
        ),
        (
            f"model_engine=megatron {MODEL}.lora.rank=8 {MODEL}.lora.alpha=4",
            (8, 4.0, ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")),
        ),
        (f"{MODEL}.lora_rank=8 {MODEL}.target_modules=[q_proj,v_proj]", (8, 16.0, ("q_proj", "v_proj"))),
    ],
)
def test_the_schema_of_lora_that_is_switched_on_is_read(accepted, text, expected):
    lora = accepted(text).lora
    assert (lora.rank, lora.alpha, lora.target_modules) == expected


def test_two_schemas_of_lora_that_are_both_on_lose_one(convert):
    code, comments, ours = convert(f"{MODEL}.lora_rank=8 {MODEL}.lora.rank=16")
    assert code == 1
    assert any(f"# lost: {MODEL}.lora.rank=16: {MODEL}.lora_* is read" in line for line in comments)
    assert ours["lora"]["rank"] == 8


# -- Megatron
def test_router_replay_is_ours(accepted):
    actor = "actor_rollout_ref.actor.strategy=megatron actor_rollout_ref.actor.megatron.router_replay.mode=R3"
    rollout = "actor_rollout_ref.rollout.name=hf actor_rollout_ref.rollout.enable_rollout_routing_replay=True"
    config = accepted(f"{actor} {rollout}")
    assert config.algorithm.router_replay == "R3"


@pytest.mark.parametrize("named", ["", " actor_rollout_ref.rollout.name=sglang"])
def test_router_replay_takes_the_engine_that_reports_experts(accepted, imported, named):
    actor = "actor_rollout_ref.actor.strategy=megatron actor_rollout_ref.actor.megatron.router_replay.mode=R3"
    file = f"{actor} actor_rollout_ref.rollout.gpu_memory_utilization=0.6{named}"
    assert accepted(file).rollout.name == "hf"
    assert any("hf generates" in note for note in imported(file).notes.values())


def test_megatron_is_ours(accepted):
    whole = "actor_rollout_ref.actor.strategy=megatron actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2"
    config = accepted(f"{whole} actor_rollout_ref.actor.megatron.use_distributed_optimizer=False")
    assert (config.model_engine, config.ranks, config.algorithm.adv_estimator) == ("megatron", 2, "gae")
    assert not config.megatron.distributed_optimizer
    assert config.megatron.sequence_parallel  # verl's default with tensor parallelism
    assert config.megatron.param_dtype == "bfloat16"
    one = accepted(
        "model_engine=megatron trainer.total_training_steps=10 actor_rollout_ref.actor.optim.lr_decay_style=cosine "
        "actor_rollout_ref.actor.optim.min_lr=1e-7"
    )
    assert (one.megatron.sequence_parallel, one.megatron.distributed_optimizer) == (False, True)
    assert (one.actor.optim.lr_decay_steps, one.actor.optim.min_lr_ratio) == (40, pytest.approx(0.1))


def test_the_configuration_of_megatron_is_known_by_its_file(accepted):
    text = "python3 -m verl.trainer.main_ppo --config-path=config --config-name='ppo_megatron_trainer.yaml' trainer.nnodes=1"
    assert accepted(text).model_engine == "megatron"


# -- files
def test_references_are_followed_also_into_verls_defaults(accepted):
    nested = {
        "defaults": ["ppo_trainer", "_self_"],
        "hydra": {"run": {"dir": "${now:%Y}"}},
        "data": {"train_batch_size": 128},
        "actor_rollout_ref": {
            "actor": {
                "ppo_mini_batch_size": "${data.train_batch_size}",
                "_target_": "verl.workers.config.FSDPActorConfig",
            },
            "rollout": {"response_length": "${data.max_response_length}", "n": "${oc.select:trainer.nnodes,4}"},
        },
    }
    config = accepted(yaml.safe_dump(nested), name="verl.yaml")
    assert (config.actor.ppo_mini_batch_size, config.rollout.response_length, config.rollout.n) == (128, 512, 1)


@pytest.mark.parametrize("text", ["a: [", None])
def test_a_file_that_can_not_be_read_is_named_without_a_flag(tmp_path, text):
    """`rl import-verl` has no flag for it."""
    if text is not None:
        (tmp_path / "verl.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"^The verl file .*verl\.yaml:? can't be read"):
        read_verl(tmp_path / "verl.yaml")


def test_a_reference_to_nothing_is_refused_by_name(convert, capsys, tmp_path):
    (tmp_path / "verl.yaml").write_text("data: {seed: '${nowhere}'}")
    assert main(["--from-verl", str(tmp_path / "verl.yaml")]) == 2
    err = capsys.readouterr().err
    assert "'nowhere'" in err
    assert "data.seed" in err


def test_a_configuration_that_builds_on_one_that_is_not_there_loses_it(convert):
    code, comments, _ = convert("defaults: [my_base, _self_]\ndata: {train_batch_size: 256}\n", name="verl.yaml")
    assert code == 1
    assert any("--config-name=my_base: the configuration it names is not read" in line for line in comments)
    text = "defaults:\n- ppo_trainer\n- model_engine: megatron\n- actor@actor_rollout_ref.actor: megatron_actor\n- _self_\n"
    code, comments, ours = convert(text, name="verl.yaml")
    assert (code, ours["model_engine"]) == (0, "megatron")


SCRIPT = r"""#!/usr/bin/env bash
set -xeuo pipefail
# don't run this: it's a test
project_name='DAPO'
MODEL_PATH=${MODEL_PATH:-"${MODELS}/Qwen"}
export N=${1:-4}
max_prompt_length=$((1024 * 2))
max_response_length=1024
files="['$MODELS/a.parquet', '$MODELS/b.parquet']"

DATA=(
    data.train_files="$files"
    data.val_files="['$MODELS/v.parquet']"
    data.max_prompt_length=${max_prompt_length}
)
if [ "$N" = 4 ]; then
    echo "ok: fine"
fi
python3 -m verl.trainer.main_ppo "${DATA[@]}" \
    actor_rollout_ref.model.path="${MODEL_PATH}" \
    actor_rollout_ref.rollout.n=${N} \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$(((max_prompt_length + max_response_length) * 2)) \
    actor_rollout_ref.actor.ppo_mini_batch_size='${data.train_batch_size}' \
    trainer.project_name="${project_name}" $@
"""


def test_a_shell_script_is_read_with_its_variables(tmp_path):
    (tmp_path / "run.sh").write_text(SCRIPT)
    values = read_verl(tmp_path / "run.sh", {"MODELS": "/models"})
    assert values == {
        "data.train_files": ["/models/a.parquet", "/models/b.parquet"],
        "data.val_files": ["/models/v.parquet"],
        "data.max_prompt_length": 2048,
        "actor_rollout_ref.model.path": "/models/Qwen",
        "actor_rollout_ref.rollout.n": 4,
        "actor_rollout_ref.actor.use_dynamic_bsz": True,
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 6144,
        "actor_rollout_ref.actor.ppo_mini_batch_size": "${data.train_batch_size}",
        "trainer.project_name": "DAPO",
    }


@pytest.mark.parametrize("here", ["$(pwd)", "`pwd`"])
def test_the_working_directory_is_that_of_the_command(tmp_path, here):
    (tmp_path / "run.sh").write_text(f'PROJECT_DIR="{here}"\npython3 x data.train_files="$PROJECT_DIR/a.parquet"\n')
    assert read_verl(tmp_path / "run.sh", {"PWD": "/project"}) == {"data.train_files": "/project/a.parquet"}
    assert read_verl(tmp_path / "run.sh", {}) == {"data.train_files": f"{Path.cwd()}/a.parquet"}


@pytest.mark.parametrize("value", ["$NOWHERE/x", "${NOWHERE}", "$(nproc)", "$1"])
def test_what_only_the_shell_knows_is_refused(tmp_path, value):
    (tmp_path / "run.sh").write_text(f"python3 -m verl.trainer.main_ppo data.train_files={value}\n")
    with pytest.raises(ConfigError, match=r"data\.train_files=.* uses what only the shell knows"):
        read_verl(tmp_path / "run.sh", {})


@pytest.mark.parametrize("text", ["#!/bin/bash\necho hello\n", "def f(x: int):\n    return {x: [\n"])
def test_a_script_without_settings_of_verl_is_refused(tmp_path, text):
    (tmp_path / "run.sh").write_text(text)
    with pytest.raises(ConfigError, match=r"^The verl file .*run\.sh has no settings of verl, such as"):
        read_verl(tmp_path / "run.sh")


def test_a_script_that_only_names_its_configuration_is_read(tmp_path):
    (tmp_path / "run.sh").write_text("python3 -m verl.trainer.main_ppo --config-name=ppo_megatron_trainer\n")
    assert read_verl(tmp_path / "run.sh", {}) == {"--config-name": "ppo_megatron_trainer"}


def test_yaml_needs_no_suffix(tmp_path):
    (tmp_path / "run").write_text("data:\n  train_batch_size: 8\n")
    assert read_verl(tmp_path / "run") == {"data.train_batch_size": 8}


@pytest.mark.parametrize("text", ["defaults:\n", "defaults: []\n", "defaults: [_self_]\n"])
def test_defaults_may_be_empty(tmp_path, text):
    file = tmp_path / "verl.yaml"
    file.write_text(f"{text}data: {{train_batch_size: 8}}\n")
    assert read_verl(file)["data.train_batch_size"] == 8


def test_defaults_that_are_no_list_are_refused(tmp_path):
    file = tmp_path / "verl.yaml"
    file.write_text("defaults: 5\n")
    with pytest.raises(ConfigError, match=r"defaults must be a list of configurations.*; got 5"):
        read_verl(file)
    file.write_text("defaults: [{1: 2}]\n")
    assert read_verl(file) == {"1": 2}


def test_a_key_that_is_taken_away_is_null(tmp_path):
    (tmp_path / "verl.txt").write_text("~trainer.logger data.train_batch_size=2048 data.train_batch_size=512")
    imported = import_verl(read_verl(tmp_path / "verl.txt"))
    assert "trainer.logger" not in imported.settings
    assert imported.settings["data.train_batch_size"] == 512


def test_nothing_else_may_be_given_beside(tmp_path, capsys):
    (tmp_path / "verl.txt").write_text("")
    assert main(["--from-verl", str(tmp_path / "verl.txt"), "rollout.n=2"]) == 2
    assert "--from-verl takes no overrides" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "ours"),
    [
        ("algorithm.adv_estimator=gae", "recompute"),
        ("algorithm.rollout_correction.bypass_mode=True", "rollout"),
        ("algorithm.rollout_correction.bypass_mode=False", "recompute"),
    ],
)
def test_verl_computes_old_log_probs_unless_it_bypasses_them(convert, text, ours):
    assert convert(f"{text} data.train_files=a.parquet")[2]["algorithm"]["old_log_prob"] == ours


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("actor_rollout_ref.model.lora.rank=eight", r"lora\.rank of verl must be a number; got 'eight'"),
        ("trainer.save_freq={}", r"trainer\.save_freq of verl must be a number; got {}"),
        ("algorithm.adv_estimator=[gae]", r"algorithm\.adv_estimator of verl can't be \['gae'\]: .* default is 'gae'"),
        ("critic.model.lora.rank=1e-6", r"critic\.model\.lora\.rank of verl can't be 1e-06"),
    ],
)
def test_a_value_of_another_type_is_refused(tmp_path, setting, message):
    (tmp_path / "verl.txt").write_text(setting)
    with pytest.raises(ConfigError, match=message):
        from_verl(tmp_path / "verl.txt")


def test_an_estimator_that_is_not_known_is_lost(tmp_path):
    (tmp_path / "verl.txt").write_text("algorithm.adv_estimator=mine actor_rollout_ref.rollout.n=4")
    assert any("mine" in key for key in from_verl(tmp_path / "verl.txt").lost)
