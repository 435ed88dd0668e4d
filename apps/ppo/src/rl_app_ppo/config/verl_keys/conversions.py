"""Conversions of single verl values."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath

from rl_app_ppo.config.verl_keys.aliases import BOUND, ON_UPDATE
from rl_app_ppo.config.verl_keys.key_entries import Answer, Convert, Lost, Note, Value, Verl
from rl_protocol.support.options import items, nearest
from rl_trainer.algorithms.advantages import ADVANTAGE_ESTIMATORS
from rl_trainer.config.critic import CRITIC_AGG_MODES
from rl_trainer.config.kl import KL_ALIASES, KL_LOSSES
from rl_trainer.config.optim import LR_SCHEDULES

ACTOR = "actor_rollout_ref.actor"
MODEL = "actor_rollout_ref.model"
ROLLOUT = "actor_rollout_ref.rollout"
PREFIX = {"actor": ACTOR, "critic": "critic"}
"""Role -> verl's group of its settings."""

FUSED = {
    "linear_qkv": "q_proj,k_proj,v_proj",
    "linear_proj": "o_proj",
    "linear_fc1": "gate_proj,up_proj",
    "linear_fc2": "down_proj",
}
"""Megatron-Core's modules -> the logical names they hold."""
ESTIMATORS = {
    **{name: name for name in ADVANTAGE_ESTIMATORS.names()},
    "grpo_vectorized": "grpo",
    "rloo_vectorized": "rloo",
    "tir_optimal_token_baseline": "optimal_token_baseline",
}
KL = {name: name for name in (*KL_LOSSES, *KL_ALIASES, *(f"{alias}+" for alias in KL_ALIASES))}
DTYPES = {"bfloat16": "bfloat16", "bf16": "bfloat16", "float32": "float32", "fp32": "float32"}
METRICS = {"acc": "acc", "score": "score", "reward": "score", "seq_reward": "score", "seq_final_reward": "score"}
ENGINES = {"fsdp": "fsdp", "fsdp2": "fsdp", "dp": "fsdp", "megatron": "megatron"}
LOGGERS = ("console", "tensorboard", "wandb", "mlflow", "trackio")
TRANSPORTS = ("nccl", "nixl", "mooncake")
BY_DATA_SOURCE = (
    "the data_source of each row chooses the reward, as there: openai/gsm8k is scored as verl does; MATH is compared as mathematics, verl "
    "compares its text"
)

TOOLS = "register each tool as a ToolKind (docs/guides/tool.md), and name them in rollout.agent.tools"
"""Why files of tools are not read: they name classes of verl's kind."""


def one_of(key: str, known: Mapping[str, str]) -> Convert:
    """`known` are verl's values -> ours."""

    def convert(value: Value, _: Verl) -> Answer:
        return {key: known[value]} if value in known else Lost(f"{value} is not supported.{nearest(str(value), known)}")

    return convert


def at_least_0(key: str) -> Convert:
    """verl writes a negative number for "never" or "not set"; here that is 0."""

    def convert(value: Value, _: Verl) -> Answer:
        return {key: max(int(value), 0)}

    return convert


def kept_tokens(key: str) -> Convert:
    """verl samples from a part of the tokens, and trains on log-probs over all of them."""

    def convert(value: Value, _: Verl) -> Answer:
        truncates = value < 1 if key == "rollout.top_p" else value > 0
        return {key: max(value, 0), "rollout.sampling_replay": False} if truncates else {key: max(value, 0)}

    return convert


def if_positive(key: str) -> Convert:
    """verl writes 0 or -1 for "not set"."""

    def convert(value: Value, _: Verl) -> Answer:
        return {key: value} if value > 0 else {}

    return convert


def unless(default: Value, key: str) -> Convert:
    """verl's default is for its own engines, and is not carried over."""

    def convert(value: Value, _: Verl) -> Answer:
        return {} if value == default else {key: value}

    return convert


def of_vllm(key: str, default: Value = None) -> Convert:
    """A setting that only vLLM reads; verl's default is for its own engines."""

    def convert(value: Value, verl: Verl) -> Answer:
        return {key: value} if value != default and verl.get(f"{ROLLOUT}.name") != "hf" else {}

    return convert


# -- optimizers


def optimizer_steps(role: str, verl: Verl) -> int:
    """Optimizer steps per training step.

    verl updates its schedules once per training step; here they are updated per optimizer step.
    """
    prefix = PREFIX[role]
    mini = int(verl.get(f"{prefix}.ppo_mini_batch_size", 1))
    return max(-(-int(verl.get("data.train_batch_size", 1)) // mini), 1) * int(verl.get(f"{prefix}.ppo_epochs", 1))


def run_length(verl: Verl) -> int:
    """Training steps of the run, from the configuration alone; 0: it depends on the data."""
    return int(verl.get("trainer.total_training_steps", 0))


def falls(role: str, verl: Verl) -> bool:
    """Whether the learning rate decays after the warm-up."""
    optim = f"{PREFIX[role]}.optim"
    kinds = (verl.get(f"{optim}.{name}") for name in ("warmup_style", "lr_scheduler_type", "lr_decay_style"))
    return any(kind not in (None, "constant") for kind in kinds)


def decay(role: str) -> Convert:
    """The kind of schedule, and where it ends."""

    def convert(value: Value, verl: Verl) -> Answer:
        if value not in LR_SCHEDULES:
            return Lost(f"{value} is not supported.{nearest(str(value), LR_SCHEDULES)}")
        if value == "constant":
            return {}
        steps = int(verl.get(f"{PREFIX[role]}.optim.lr_decay_steps", 0)) or run_length(verl)
        if not steps:
            return Lost(
                f"verl computes its end from the size of the data; set {role}.optim.lr_scheduler_type={value} and {role}.optim.lr_decay_steps "
                "(optimizer steps), or give verl's trainer.total_training_steps"
            )
        return {
            f"{role}.optim.lr_scheduler_type": value,
            f"{role}.optim.lr_decay_steps": steps * optimizer_steps(role, verl),
        }

    return convert


def warmup(role: str) -> Convert:
    """Training steps -> optimizer steps."""

    def convert(value: Value, verl: Verl) -> Answer:
        return {f"{role}.optim.lr_warmup_steps": int(value) * optimizer_steps(role, verl)} if value > 0 else {}

    return convert


def warmup_ratio(role: str) -> Convert:
    """A fraction of the run; verl reads it if lr_warmup_steps is not set."""

    def convert(value: Value, verl: Verl) -> Answer:
        key = f"{role}.optim.lr_warmup_steps"
        if verl.get(f"{PREFIX[role]}.optim.lr_warmup_steps", -1) > 0:
            return Note("verl reads lr_warmup_steps, which is set")
        if not value:
            return {key: 0}
        if not run_length(verl):
            return Lost(
                f"verl computes the steps from the size of the data; set {key} (optimizer steps), or give verl's trainer.total_training_steps"
            )
        return {key: int(value * run_length(verl)) * optimizer_steps(role, verl)}

    return convert


def least_ratio(role: str) -> Convert:
    """min_lr_ratio."""

    def convert(value: Value, verl: Verl) -> Answer:
        return {f"{role}.optim.min_lr_ratio": value} if falls(role, verl) else _constant(value)

    return convert


def least(role: str) -> Convert:
    """min_lr, an absolute learning rate."""

    def convert(value: Value, verl: Verl) -> Answer:
        lr = verl.get(f"{PREFIX[role]}.optim.lr")
        return {f"{role}.optim.min_lr_ratio": value / lr} if falls(role, verl) and value else _constant(value)

    return convert


def decay_only(role: str, *allowed: Value, why: str) -> Convert:
    """Matters only if the learning rate decays."""

    def convert(value: Value, verl: Verl) -> Answer:
        return {} if value in allowed else Lost(why) if falls(role, verl) else _constant(value)

    return convert


def _constant(value: Value) -> Answer:
    return Note("verl does not read it with a constant learning rate") if value else {}


# -- engines and batches


def strategy(value: Value, _: Verl) -> Answer:
    """verl's engines -> ours."""
    if value not in ENGINES:
        return Lost(f"{value} is not supported.{nearest(str(value), ENGINES)}")
    return {"model_engine": ENGINES[value]}


def micro(role: str, key: str, *, dynamic: bool) -> Convert:
    """verl cuts forward passes by rows, or with use_dynamic_bsz by tokens."""

    def convert(value: Value, verl: Verl) -> Answer:
        if bool(verl.get(f"{PREFIX[role]}.use_dynamic_bsz", default=False)) == dynamic:
            return {f"{role}.{key}": value}
        return Note(f"verl does not read it with use_dynamic_bsz={str(not dynamic).lower()}")

    return convert


def sequence_parallel(value: Value, verl: Verl) -> Answer:
    """verl also enables it without tensor parallelism, where Megatron ignores it."""
    shared = int(verl.get(f"{ACTOR}.megatron.tensor_model_parallel_size", 1)) > 1
    return {"megatron.sequence_parallel": bool(value) and shared}


def clip_ratio(value: Value, verl: Verl) -> Answer:
    """verl reads it only for a bound that is null."""
    sides = [f"clip_ratio_{side}" for side in ("low", "high")]
    settings = {f"actor.{side}": value for side in sides if verl.get(f"{ACTOR}.{side}") is None}
    if settings or value == verl.get(f"{ACTOR}.clip_ratio_low"):
        return settings
    return Note(
        "verl reads clip_ratio_low and clip_ratio_high, which are not null; clip_ratio alone has no effect there"
    )


def critic_agg_mode(value: Value, verl: Verl) -> Answer:
    """The critic does not support all modes of the actor."""
    if value in CRITIC_AGG_MODES or not verl.has_critic:
        return {"critic.loss_agg_mode": value} if value in CRITIC_AGG_MODES else {}
    return Lost(f"the critic has {', '.join(CRITIC_AGG_MODES)}")


def critic_path(value: Value, verl: Verl) -> Answer:
    """The critic here starts from the policy's model."""
    if value == verl.get(f"{MODEL}.path"):
        return {}
    why = "the critic starts from model.path, the model of the policy"
    return Lost(why) if verl.has_critic else Note("there is no critic")


def critic_enable(value: Value, verl: Verl) -> Answer:
    """Here the estimator decides, as in verl if this is null."""
    return {} if bool(value) == verl.has_critic else Lost("algorithm.adv_estimator decides whether there is a critic")


# -- LoRA, which verl has two schemas for


def reads_nested(verl: Verl) -> bool:
    """Whether model.lora.* applies, not model.lora_rank: the enabled one, else the engine's."""
    nested, flat = (int(verl.get(f"{MODEL}.{name}", 0)) > 0 for name in ("lora.rank", "lora_rank"))
    return nested if nested != flat else verl.megatron


def lora(verl_key: str, key: str) -> Convert:
    """A key of one of the two schemas; it is ignored if the other one applies."""
    nested = verl_key.startswith(f"{MODEL}.lora.")

    def convert(value: Value, verl: Verl) -> Answer:
        if reads_nested(verl) != nested:
            used = f"{MODEL}.lora" if not nested else f"{MODEL}.lora_*"
            both = all(int(verl.get(f"{MODEL}.{rank}", 0)) > 0 for rank in ("lora.rank", "lora_rank"))
            return Lost(f"{used} is read, and is set as well") if both else Note(f"{used} is read")
        if verl_key.endswith("_modules"):
            return {key: [part for name in items(value) for part in items(FUSED.get(name, name))]}
        return {key: "" if value is None else value}

    return convert


def lora_type(value: Value, _: Verl) -> Answer:
    """lora or dora."""
    if value in ("lora", "dora"):
        return {"lora.use_dora": value == "dora"}
    return Lost(f"adapters of type {value} are not supported")


def critic_lora(value: Value, verl: Verl) -> Answer:
    """One set of adapter settings serves policy and critic."""
    if not int(str(value or 0)):
        return {}
    policy = int(verl.get(f"{MODEL}.{'lora.rank' if reads_nested(verl) else 'lora_rank'}", 0))
    if not verl.has_critic:
        return Note("there is no critic")
    if int(str(value)) != policy:
        return Lost(f"adapters of the critic have the rank of the policy's, which is {policy}")
    return {"critic.use_lora": True}


def critic_adapters(verl_key: str) -> Convert:
    """A setting of the critic's adapters, which have those of the policy's."""
    name = verl_key.removeprefix("critic.model.")
    nested = name.startswith("lora.")
    option = name.removeprefix("lora.").removeprefix("lora_")

    def convert(value: Value, verl: Verl) -> Answer:
        rank = verl.get(f"critic.model.lora{'.' if nested else '_'}rank", 0)
        if not verl.has_critic or not int(str(rank)):
            return Note("the critic has no such adapters")
        flat = "lora_alpha" if option == "alpha" else option
        policy = f"{MODEL}.lora.{option}" if reads_nested(verl) else f"{MODEL}.{flat}"
        if items(value) != items(verl.get(policy)):
            return Lost(f"adapters of the critic have the settings of the policy's, and {policy} is {verl.get(policy)}")
        return {}

    return convert


# -- rollout


def replacing_engine(verl: Verl) -> str:
    """The engine that generates if the file names none, or one that is not supported."""
    return "hf" if verl.get(f"{ACTOR}.megatron.router_replay.mode") == "R3" else "vllm"  # vllm reports no experts


def rollout_name(value: Value, verl: Verl) -> Answer:
    """The choice of engine does not change the distribution of responses."""
    if value in ("hf", "vllm"):
        return {"rollout.name": value}
    if value in ("sglang", "trtllm"):
        name = replacing_engine(verl)
        return Note(f"{value} is not supported; {name} generates instead", {"rollout.name": name})
    return Lost(f"{value} is not supported; there are vllm and hf")


def val_temperature(value: Value, verl: Verl) -> Answer:
    """verl validates greedily without do_sample, whatever the temperature."""
    sampled = bool(verl.get(f"{ROLLOUT}.val_kwargs.do_sample", default=False))
    if value and not sampled:
        return Note(
            "verl validates greedily without val_kwargs.do_sample=true", {"rollout.val_kwargs.temperature": 0.0}
        )
    return {"rollout.val_kwargs.temperature": value}


def sync_backend(value: Value, verl: Verl) -> Answer:
    """verl's naive is for processes that share a device; the default here is shared memory."""
    if value == "naive":
        return {}
    if value in TRANSPORTS or verl.get(f"{ROLLOUT}.checkpoint_engine.custom_backend_module"):
        return {"checkpoint_engine.backend": value}
    return Note(f"{value} is not supported; checkpoint_engine.backend keeps its default")


def plugin(key: str) -> Convert:
    """A user's module or class, which the operator must allow."""

    def convert(value: Value, _: Verl) -> Answer:
        return Note("it loads where RL_PLUGINS allows it; see the README of rl-ckpt-engine", {key: value})

    return convert


# -- data and rewards


def truncation(value: Value, verl: Verl) -> Answer:
    """Longer prompts are left out or refused, never cut."""
    if value == "error":
        return {}
    if verl.get("data.filter_overlong_prompts", default=False):
        return Note("no prompt is too long with data.filter_overlong_prompts=true")
    return Lost("prompts are not cut; set data.filter_overlong_prompts=true")


def custom_reward(prefix: str) -> Convert:
    """A file and a function in it."""

    def convert(value: Value, verl: Verl) -> Answer:
        name = verl.get(f"{prefix}.name", "compute_score")
        function = f"{value}:{name}"
        return Note(f"add --trust {value} to the command that trains", {"reward.function": function})

    return convert


def reward_manager(value: Value, _: Verl) -> Answer:
    """Other settings here do what the managers do besides calling the function."""
    if value in ("naive", "dapo", "batch", "prime", "remote", "rate_limited"):
        return {}
    return Lost(f"the reward manager {value} is not supported")


def reward_by_source(value: Value, verl: Verl) -> Answer:
    """Without a user's function, the data source of a row selects the reward."""
    if value != "data_source":
        return Lost("the field of a row that names its task is data_source")
    custom = any(verl.get(f"{prefix}custom_reward_function.path") for prefix in ("reward.", ""))
    return {} if custom else Note(BY_DATA_SOURCE, {"reward.function": "by_data_source"}, always=True)


def overlong(key: str, prefix: str) -> Convert:
    """DAPO's penalty for overlong responses."""

    def convert(value: Value, verl: Verl) -> Answer:
        if verl.get(f"{prefix}.enable", default=False):
            return {f"reward.overlong.{key}": value}
        return Note(f"verl does not read it without {prefix}.enable=true")

    return convert


# -- the run


def total_steps(value: Value, _: Verl) -> Answer:
    """null: trainer.total_epochs alone limits the run."""
    return {"trainer.total_training_steps": -1 if value is None else value}


def critic_warmup(value: Value, _: Verl) -> Answer:
    """verl trains the actor from the step of this number on; its first step is 1."""
    return {"critic.warmup_steps": max(int(value) - 1, 0)}


def loggers(value: Value, _: Verl) -> Answer:
    """Those that exist here."""
    names = items(value)
    known, unknown = [n for n in names if n in LOGGERS], [n for n in names if n not in LOGGERS]
    settings = {"trainer.logger": known} if known else {}
    return Note(f"there is no logger {', '.join(unknown)} here", settings) if unknown else settings


def output_dir(value: Value, verl: Verl) -> Answer:
    """verl's folder of a run; here that is trainer.output_dir/trainer.run_name."""
    path = PurePosixPath(str(value))
    return {"trainer.output_dir": str(path.parent if path.name == verl.get("trainer.experiment_name") else path)}


def run_name(value: Value, _: Verl) -> Answer:
    """The name of a folder has no slashes."""
    return {"trainer.run_name": str(value).replace("/", "-")}


def resume(value: Value, _: Verl) -> Answer:
    """auto, disable, or a path beside it."""
    if value == "resume_path":
        return Lost("checkpoints of verl can't be resumed here")
    return {"trainer.resume_mode": value}


def gpus(value: Value, verl: Verl) -> Answer:
    """Hosts and devices are those of this run, not those of verl's."""
    group, count = ("megatron" if verl.megatron else "fsdp"), int(value) * int(verl.get("trainer.nnodes", 1))
    why = (
        f"{group}.world_size is the number of processes that share each model; set it to {count} for as many devices. rollout.share_gpus=true "
        "lets vLLM generate on the same ones, as verl does by default"
    )
    return Note(why, always="trainer.n_gpus_per_node" in verl.given)


def keep(value: Value, _: Verl) -> Answer:
    """null: all checkpoints are kept."""
    return {"trainer.max_ckpt_to_keep": 0 if value is None else value}


def storage(value: Value, _: Verl) -> Answer:
    """Where the data plane keeps its bytes."""
    known = {"SimpleStorage": "simple", "MooncakeStore": "mooncake"}
    if value not in known:
        return Note(f"{value} is not supported; transfer_queue.backend keeps its default")
    return {} if value == "SimpleStorage" else {"transfer_queue.backend": known[value]}


def free_cache_engine(value: Value, verl: Verl) -> Answer:
    """Replicas that generate beside training keep their memory, also in verl's separate_async."""
    synchronous = verl.get("trainer.v1.trainer_mode", "sync") == "sync"
    return {"rollout.free_cache_engine": value} if synchronous else {}


def trainer_mode(value: Value, verl: Verl) -> Answer:
    """verl's trainer: synchronous, or with generation beside training."""
    if value == "sync":
        return {}
    if value != "separate_async":
        return Lost(f"{value} is not supported; generation beside training needs processes of its own (separate_async)")
    bound = int(verl.get("trainer.v1.sampler.max_off_policy_threshold", 0))
    depth = max(1, int(verl.get("trainer.v1.separate_async.num_warmup_batches", 1)))
    ahead = {
        "async_rl.depth": min(depth, bound),
        ON_UPDATE: "continue",
        "async_rl.order": "ready_first",
        "async_rl.when_stale": str(verl.get("trainer.v1.sampler.max_off_policy_strategy", "drop")),
    }
    return Note(
        "as in verl, new weights continue the responses that are being generated, a step trains on the groups that are ready first, and "
        "trainer.v1.sampler.max_off_policy_strategy says whether it waits for those that would get too old, or drops them",
        {BOUND: bound} | (ahead if bound else {}),
        always=True,
    )


def agent_loop(value: Value, _: Verl) -> Answer:
    """The agent of rows without `agent_name`."""
    known = {"single_turn_agent": {}, "tool_agent": {"rollout.session": "tool_agent"}}
    return known.get(str(value), Lost("set rollout.session to a session that an installed package offers"))
