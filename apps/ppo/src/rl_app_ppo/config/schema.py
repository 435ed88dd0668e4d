"""The typed schema of the configuration: the settings of each component and of the app."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf
from typing import Literal, TypeVar

from rl_app_ppo.config.loss_parts import check_loss_parts
from rl_app_ppo.config.placement import AUTO, MODELS, NAMED, parse_placement
from rl_app_ppo.config.presets import NO_PRESET
from rl_app_ppo.config.restart import RestartConfig
from rl_app_ppo.config.rollout_engines import ROLLOUT_ENGINES, GenerationConfig, RolloutEngineKind
from rl_app_ppo.config.training_backends import (
    TRAINING_BACKENDS,
    TrainingBackendSpec,
    get_training_backend,
    with_engine_groups,
)
from rl_app_ppo.demo.demos import DEMOS
from rl_ckpt_engine import CheckpointEngineConfig
from rl_protocol.support.options import Options, condition, group, option, require
from rl_trainer import needs_critic, needs_reference
from rl_trainer.algorithms.advantages import estimators_use
from rl_trainer.config import (
    ActorConfig,
    AlgorithmConfig,
    AsyncConfig,
    CriticConfig,
    LoopConfig,
    OverlongConfig,
    ReplayConfig,
)
from rl_trainer.config.backends import EngineConfig
from rl_trainer.config.lora import LoraConfig
from rl_trainer.graph.config_checks import check_combination, check_staleness
from rl_trainer.rewards import parse_terms
from rl_trainer.rewards.loading import HARMLESS
from rl_trainer.rewards.scorer_toml import is_scorer_toml
from rl_transferqueue import TransferQueueConfig

AS_STAGES = -1.0
"""Value of trainer.hang_report_s that takes 1.5 * trainer.stage_timeout_s."""
ALL_GPUS = -1
"""Value of trainer.n_gpus_per_node that uses those that Ray has."""
LONGEST_NAME = 200
"""Bytes of trainer.run_name: names of files that contain it have at most 255."""
E = TypeVar("E", bound=EngineConfig)
ON_BAD_ROW = ("error", "skip")
ON_CHANGED_FILE = ("error", "accept")
DEMO_USED = "!model.path or !train_files"
"""The demo task is trained on, or the demo model is warmed up on it."""


@dataclass(frozen=True, kw_only=True)
class DataConfig(Options):
    """Prompts and batches: files, or the demo task."""

    train_batch_size: int = option(64, "prompts per step", ge=1, verl=".")
    train_files: tuple[str, ...] = option(
        (),
        "training files, optionally with shares as in 0.7*a.jsonl,0.3*b.parquet, or folders of save_to_disk; empty: the demo",
        verl=".",
    )
    val_files: tuple[str, ...] = option(
        (), "validation files, without shares; empty: data.val_split of the rows of train_files", verl="."
    )
    val_split: float = option(
        0.1,
        "share of the rows of train_files held out for validation if val_files is empty and trainer.test_freq is above 0",
        ge=0,
        lt=1,
        needs=("train_files", "!val_files", "trainer.test_freq>0"),
    )
    curriculum: str = option(
        "",
        "order of prompts; empty: shuffled each epoch, with the shares of train_files",
        plugins="rl_trainer.curricula",
    )
    target_score: float = option(
        0.5,
        "mean score of the prompts that data.curriculum=target_score draws most",
        lt=inf,
        needs="curriculum=target_score",
    )
    prompt_key: str = option(
        "prompt", "field of a row with the prompt: a list of messages, or a string", needs="train_files", verl="."
    )
    ground_truth_key: str = option(
        "ground_truth",
        "field of a row with the right answer, a string or a number, in rows without reward_model",
        needs="train_files",
    )
    answer_key: str = option(
        "ground_truth",
        "answer for algorithm.sft_coef and teacher_context: ground_truth, or the key of a text in a row's extra_info, such as answer",
        needs="demonstrates or algorithm.teacher_context",
    )
    max_prompt_length: int = option(512, "most tokens of a prompt from a file", ge=1, needs="train_files", verl=".")
    filter_overlong_prompts: bool = option(
        True, "drop prompts longer than max_prompt_length; false: they are bad rows", needs="train_files", verl="."
    )
    on_bad_row: str = option(
        "error", "invalid rows: error, or skip (the number is reported)", choices=ON_BAD_ROW, needs="train_files"
    )
    on_changed_file: str = option(
        "error",
        "files of train_files and val_files that have changed since the checkpoint from which a run resumes: error, or accept (each is named)",
        choices=ON_CHANGED_FILE,
        needs="train_files",
        resume="silent",
    )
    demo: str = option("sums", "task of the demo", choices=DEMOS, needs=DEMO_USED)
    train_size: int = option(4000, "demo: problems in the training split", ge=1, needs=DEMO_USED)
    val_size: int = option(
        512, "demo: problems in the validation split; the splits never overlap", ge=1, needs=DEMO_USED, resume="free"
    )
    seed: int = option(0, "demo: seed of the problems, the splits and the warm-up of its model", ge=0, needs=DEMO_USED)

    def check(self, path: str) -> None:
        require(
            bool(self.files("train")) or not self.files("val"),
            f"{path}val_files",
            f"empty if {path}train_files is empty: the demo has its own validation split",
            self.val_files,
        )
        given = {weight is None for _, weight in _weighted(self.train_files)}
        require(len(given) < 2, f"{path}train_files", "files that all have a share, or none of them", self.train_files)
        require(
            all(weight is None for _, weight in _weighted(self.val_files)),
            f"{path}val_files",
            "files without shares",
            self.val_files,
        )
        require(
            len(set(self.files("train"))) == len(self.files("train")),
            f"{path}train_files",
            "different files",
            self.train_files,
        )
        require(
            not (self.curriculum and self.shares()),
            f"{path}train_files",
            f"files without shares with {path}curriculum={self.curriculum!r}, which decides how often a row appears",
            self.train_files,
        )
        require(bool(self.prompt_key), f"{path}prompt_key", "the name of a field", self.prompt_key)
        require(bool(self.ground_truth_key), f"{path}ground_truth_key", "the name of a field", self.ground_truth_key)

    def files(self, split: Literal["train", "val"]) -> tuple[str, ...]:
        """Paths of `train_files` or `val_files`."""
        return tuple(name for name, _ in _weighted(self.train_files if split == "train" else self.val_files))

    def shares(self) -> tuple[float, ...] | None:
        """Share of each training file in an epoch; None: every epoch has each row once."""
        found = [weight for _, weight in _weighted(self.train_files)]
        return None if None in found else tuple(weight or 0.0 for weight in found)


def _weighted(names: Iterable[str]) -> list[tuple[str, float | None]]:
    """Each name with the number before its star."""
    found: list[tuple[str, float | None]] = []
    for name in names:
        number, _, rest = name.partition("*")
        try:
            found.append((rest.strip(), float(number)) if rest else (name, None))
        except ValueError:
            found.append((name, None))  # the star is part of the name
    return found


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Options):
    """The initial policy."""

    path: str = option(
        "",
        "Hugging Face checkpoint folder, or name of a model in the local Hugging Face cache; empty: the demo model, "
        "made by a short supervised warm-up and cached",
        verl="actor_rollout_ref.model.path",
    )
    cache_dir: str = option(
        "~/.cache/rl-app-ppo",
        "folder of demo models and prepared data files, by content hash",
        needs="caches",
        resume="free",
    )


@dataclass(frozen=True, kw_only=True)
class ReferenceConfig(Options):
    """The reference policy."""

    path: str = option(
        "",
        "checkpoint folder, or name in the local Hugging Face cache, of a model with the same tokenizer, of any size: the teacher of "
        "algorithm=opd and opd_pg; empty: the initial policy",
    )


@dataclass(frozen=True, kw_only=True)
class RewardConfig(Options):
    """How responses are scored."""

    function: str = option(
        "exact_match",
        "a name, path.py:function, path.toml (service, judge, reward model), or a sum: 0.8*math,0.2*my.py:brief; math@gsm8k is for that data_source",
        plugins="rl_trainer.rewards",
    )
    timeout_s: float = option(
        10.0, "longest duration of one call, seconds; then its process is killed and replaced", gt=0, needs="timed"
    )
    num_workers: int = option(
        2, "processes of each reward function (exact_match and gsm8k need none)", ge=1, needs="isolated"
    )
    memory_mb: int = option(
        4096, "address space limit of each of these processes, MiB; Python itself needs 256", ge=256, needs="isolated"
    )
    overlong: OverlongConfig = group(OverlongConfig, "penalty for overlong responses")

    def check(self, path: str) -> None:
        parse_terms(self.function, f"{path}function")

    @condition("a reward.function, other than exact_match and gsm8k, that is code")
    def isolated(self) -> bool:
        """Whether any function runs in separate processes."""
        return any(not is_scorer_toml(name) for name in self._limited())

    @condition("a reward.function other than exact_match and gsm8k")
    def timed(self) -> bool:
        """Whether calls of any function have a time limit."""
        return bool(self._limited())

    def _limited(self) -> list[str]:
        return [term.name for term in parse_terms(self.function) if term.name not in HARMLESS]


@dataclass(frozen=True, kw_only=True)
class TrainerConfig(LoopConfig):
    """The training loop, and the files of the run."""

    total_epochs: int = option(
        0,
        "limit of epochs, each with one step per whole batch of the training data; 0: no limit but steps",
        ge=0,
        resume="free",
        verl=".",
    )
    output_dir: str = option("outputs", "parent of the run folders", resume="silent")
    run_name: str = option("", "name of the run folder; empty: date, time, algorithm and seed", resume="silent")
    resume_mode: str = option(
        "disable",
        "disable: a new run; auto: resume from the newest whole checkpoint of the run folder; or a checkpoint to start a new run from",
        resume="silent",
    )
    max_ckpt_to_keep: int = option(
        3, "number of newest checkpoints to keep, besides the best one; 0: all", ge=0, resume="free"
    )
    logger: tuple[str, ...] = option(
        ("console", "tensorboard"),
        "loggers besides metrics.jsonl",
        plugins="rl_app_ppo.sinks",
        resume="free",
    )
    live_panel: bool = option(
        True,
        "on a terminal, show curve, workers, throughput and times of the stages below the lines of the steps; false: lines only",
        resume="silent",
    )
    hooks: tuple[str, ...] = option((), "hooks into the training loop", plugins="rl_trainer.hooks", resume="free")
    profile_steps: tuple[int, ...] = option(
        (),
        "steps to profile with torch in every process with a model, into profile/ of the run folder; the first is 1",
        ge=1,
        resume="free",
        verl="global_profiler.steps",
    )
    min_free_disk_mb: int = option(
        100, "refuse to start with less free space than this in output_dir", ge=0, resume="free"
    )
    hang_report_s: float = option(
        AS_STAGES,
        "seconds without an answer of a worker or a settled response after which the run ends, with a report of who waits for what; "
        "0: never; -1: 1.5 * trainer.stage_timeout_s",
        resume="free",
    )
    nnodes: int = option(
        1,
        "hosts of the run; 1: GPUs are those of the driver's host. More need a Ray cluster (ray.address) with as many nodes, a data plane "
        "that listens (transfer_queue.listen), and a weight engine that works across hosts",
        ge=1,
        resume="free",
        verl=".",
    )
    n_gpus_per_node: int = option(
        ALL_GPUS,
        "most GPUs that the run uses on each host; each process that computes on GPUs has its own; 0: all compute on the CPU; -1: as many as "
        "needed of those that Ray has",
        ge=ALL_GPUS,
        resume="free",
    )
    network_interface: str = option(
        "",
        "network interface through which the ranks of a model reach each other: its name or an IPv4 address of this host; empty: loopback if "
        "they are on one host, else the one that reaches the head of the Ray cluster. Ranks do not authenticate each other: choose a private "
        "network",
        resume="free",
    )
    threads_per_worker: int = option(
        0,
        "compute threads of each worker process; 0: all cores, shared by the workers that compute at the same time",
        ge=0,
        resume="free",
    )

    def check(self, path: str) -> None:
        require(
            self.total_training_steps >= 0 or self.total_epochs >= 1,
            f"{path}total_training_steps",
            f"at least 0 without {path}total_epochs",
            self.total_training_steps,
        )
        require(bool(self.output_dir), f"{path}output_dir", "a folder", self.output_dir)
        require(
            _names_a_folder(self.run_name),
            f"{path}run_name",
            f"the name of a folder, without slashes and of at most {LONGEST_NAME} bytes",
            self.run_name,
        )
        require(bool(self.resume_mode), f"{path}resume_mode", "disable, auto or a folder", self.resume_mode)
        require(
            self.resume_mode != "auto" or bool(self.run_name),
            f"{path}run_name",
            f"given with {path}resume_mode=auto, to name the run to resume",
            self.run_name,
        )
        require(
            self.hang_report_s >= 0 or self.hang_report_s == AS_STAGES,
            f"{path}hang_report_s",
            f"seconds, 0 or {AS_STAGES:g}",
            self.hang_report_s,
        )

    @property
    def hang_s(self) -> float:
        """Seconds without progress after which a run ends; 0: it never does for that reason."""
        return 1.5 * self.stage_timeout_s if self.hang_report_s == AS_STAGES else self.hang_report_s


LOCAL = "local"
"""Value of ray.address that starts Ray for this run."""


@dataclass(frozen=True, kw_only=True)
class RayConfig(Options):
    """The Ray cluster that hosts the workers."""

    address: str = option(
        LOCAL, "local: start Ray on this machine and stop it at the end; auto or host:port: join a cluster"
    )
    start_timeout_s: float = option(
        120.0, "timeout for the start of Ray and of the workers, seconds; with vLLM on GPUs by default 1800", gt=0
    )
    cpus_per_worker: float = option(
        0.0, "CPUs Ray reserves for each worker process; 0: they share all CPUs", ge=0, lt=inf
    )

    def check(self, path: str) -> None:
        require(bool(self.address), f"{path}address", "local, auto or host:port", self.address)


@dataclass(frozen=True, kw_only=True)
@with_engine_groups
class AppConfig(Options):
    """All settings of `uv run apps/ppo`; `with_engine_groups` adds a group for each engine."""

    preset: tuple[str, ...] = option(
        (),
        f"values for the model and task of a demo, for a model and GPUs of your own, {NO_PRESET}, or YAML files; later ones override "
        "earlier ones. "
        f"Empty: the demo of the algorithm if data.train_files is empty, else {NO_PRESET}",
        resume="silent",
    )
    model_engine: str = option(
        "torch", "engine that trains the models", choices=tuple(TRAINING_BACKENDS), resume="free"
    )
    placement: tuple[str, ...] = option(
        (AUTO,),
        f"roles that share a process: {' or '.join(NAMED)} ({NAMED['fused']}), or groups such as actor+ref,critic+reward; "
        "roles that it does not name have a process each, and each rank of the actor has one with all roles of its group (the one "
        "reward worker is in the first); rollout.name=vllm, which generates in processes of its own, shares none; "
        f"{AUTO}: fused with rollout.name=hf unless rollout.num_workers, checkpoint_engine.backend or async_rl.max_staleness ask for "
        f"more processes; {MODELS} with more ranks than rollout replicas, so that not each rank holds a copy of the weights for generation",
        resume="free",
    )
    algorithm: AlgorithmConfig = group(AlgorithmConfig, "advantages", verl="algorithm")
    data: DataConfig = group(DataConfig, "task and batches", verl="data")
    model: ModelConfig = group(ModelConfig, "initial policy")
    lora: LoraConfig = group(
        LoraConfig, "adapters instead of all weights", needs="rank>0", verl="actor_rollout_ref.model"
    )
    reference: ReferenceConfig = group(ReferenceConfig, "reference policy", needs="reads_reference")
    reward: RewardConfig = group(RewardConfig, "scoring")
    actor: ActorConfig = group(ActorConfig, "policy training", verl="actor_rollout_ref.actor")
    critic: CriticConfig = group(CriticConfig, "value training", needs="trains_critic", verl="critic")
    rollout: GenerationConfig = group(GenerationConfig, "generation", verl="actor_rollout_ref.rollout")
    async_rl: AsyncConfig = group(AsyncConfig, "generation beside training", resume="free")
    replay: ReplayConfig = group(ReplayConfig, "prompts whose rollouts fail", resume="free")
    transfer_queue: TransferQueueConfig = group(TransferQueueConfig, "data plane", resume="free")
    checkpoint_engine: CheckpointEngineConfig = group(
        CheckpointEngineConfig, "weight synchronization", needs="enabled", resume="free"
    )
    trainer: TrainerConfig = group(TrainerConfig, "loop and outputs", verl="trainer")
    restart: RestartConfig = group(RestartConfig, "processes that died", resume="silent")
    ray: RayConfig = group(RayConfig, "processes", resume="free")

    @condition("an estimator with a critic, algorithm.adv_estimator=gae")
    def trains_critic(self) -> bool:
        """Whether a critic is trained."""
        return needs_critic(self.algorithm)

    @condition("algorithm.use_kl_in_reward=true, actor.use_kl_loss=true or algorithm.adv_estimator=opd")
    def reads_reference(self) -> bool:
        """Whether the divergence from the reference policy is computed."""
        return needs_reference(self.algorithm, self.actor)

    @condition("algorithm.adv_estimator=gae, reinforce_plus_plus or gigpo, or another one that discounts")
    def discounts(self) -> bool:
        """Whether an estimator of advantages discounts rewards."""
        return estimators_use(self.algorithm, "gamma")

    @condition("algorithm.adv_estimator=grpo, grpo_passk, gdpo or gigpo, or another one that divides by it")
    def divides_by_std(self) -> bool:
        """Whether an estimator of advantages divides by the standard deviation of a group."""
        return estimators_use(self.algorithm, "norm_adv_by_std_in_grpo")

    @property
    def loads_reference(self) -> bool:
        """Whether the reference is a model of its own, and not the actor or its base."""
        in_actor = self.lora.rank or self.algorithm.teacher_is_policy
        return self.reads_reference and bool(self.reference.path or not in_actor)

    @condition("lora.rank greater than 0")
    def trains_adapters(self) -> bool:
        """Whether the policy has LoRA adapters."""
        return self.lora.rank > 0

    @condition("algorithm.sft_coef above 0")
    def demonstrates(self) -> bool:
        """Whether answers of the data are trained on."""
        return self.algorithm.demonstrates

    @condition(
        "anything to cache: the demo model (model.path empty), data files (data.train_files), or objects given to train()"
    )
    def caches(self) -> bool:
        """Whether the run reads or writes `model.cache_dir`."""
        return not self.model.path or bool(self.data.train_files)

    @condition("model_engine=" + " or ".join(name for name, spec in TRAINING_BACKENDS.items() if spec.packs_sequences))
    def packs_sequences(self) -> bool:
        """Whether the engine joins sequences, and cuts batches by tokens."""
        return self.backend.packs_sequences

    @property
    def backend(self) -> TrainingBackendSpec:
        """What `model_engine` can do."""
        return get_training_backend(self.model_engine)

    @property
    def engine(self) -> EngineConfig:
        """The options of `model_engine`."""
        return getattr(self, self.model_engine)

    def engine_as(self, kind: type[E]) -> E:
        """The options of `model_engine`, which are of that type."""
        engine = self.engine
        assert isinstance(engine, kind)
        return engine

    @property
    def generator(self) -> RolloutEngineKind:
        """What `rollout.name` can do."""
        return ROLLOUT_ENGINES.get(self.rollout.name)

    @property
    def ranks(self) -> int:
        """Processes that share each trained model."""
        return self.engine.ranks

    @property
    def holds_out(self) -> bool:
        """Whether rows of the training files are held out for validation."""
        data = self.data
        return bool(data.train_files and not data.val_files and data.val_split and self.trainer.test_freq)

    @property
    def sends_adapters(self) -> bool:
        """Whether only adapters are sent to the rollout, which has loaded the base weights."""
        return self.lora.rank > 0 and not self.lora.merge

    @property
    def replicas(self) -> tuple[int, ...]:
        """Data-parallel index of each actor rank; the ranks of a model replica share rows."""
        return tuple(map(self.engine.replica, range(self.ranks)))

    def check(self, path: str) -> None:
        if self.placement != (AUTO,):
            parse_placement(self.placement)
        ROLLOUT_ENGINES.get(self.rollout.name)
        check_combination(self.algorithm, self.actor, self.rollout.n, self.reward.overlong)
        check_staleness(self.async_rl, self.algorithm, self.actor)
        check_loss_parts(self, path)
        self._check_batches(path)
        if self.trainer.deterministic:
            self._check_deterministic(path)
        longest = self.rollout.response_length
        require(
            self.reward.overlong.buffer_len <= longest,
            f"{path}reward.overlong.buffer_len",
            f"at most rollout.response_length ({longest})",
            self.reward.overlong.buffer_len,
        )
        require(
            self.rollout.n >= 2 or not self.algorithm.filter_groups.enable,
            f"{path}rollout.n",
            "at least 2 with algorithm.filter_groups.enable=true, which compares the responses to a prompt",
            self.rollout.n,
        )

    def _check_deterministic(self, path: str) -> None:
        """Refuse what makes the weights depend on timing or on the number of workers."""
        require(
            self.rollout.name == "hf",
            f"{path}rollout.name",
            "hf with trainer.deterministic=true: what vLLM generates depends on what it generates beside",
            self.rollout.name,
        )
        require(
            self.algorithm.old_log_prob == "recompute",
            f"{path}algorithm.old_log_prob",
            "recompute with trainer.deterministic=true, which sets it: the rollout engine's log-probs depend on what it generates beside",
            self.algorithm.old_log_prob,
        )
        require(
            self.async_rl.on_update == "finish",
            f"{path}async_rl.on_update",
            "finish with trainer.deterministic=true: where new weights continue or repeat a response depends on when they come",
            self.async_rl.on_update,
        )
        require(
            self.async_rl.order == "in_order",
            f"{path}async_rl.order",
            "in_order with trainer.deterministic=true: which groups are ready first depends on delays",
            self.async_rl.order,
        )
        require(
            self.trainer.threads_per_worker > 0,
            f"{path}trainer.threads_per_worker",
            "at least 1 with trainer.deterministic=true: with 0, sums depend on how many processes share the cores",
            self.trainer.threads_per_worker,
        )

    def _check_batches(self, path: str) -> None:
        batch, n, shares = self.data.train_batch_size, self.rollout.n, len(set(self.replicas))
        minis = {"actor.ppo_mini_batch_size": self.actor.ppo_mini_batch_size}
        if self.trains_critic:
            minis["critic.ppo_mini_batch_size"] = self.critic.ppo_mini_batch_size
        for key, mini in minis.items():
            require(batch % mini == 0, f"{path}data.train_batch_size", f"divisible by {key} ({mini})", batch)
            require(
                mini * n >= shares,
                path + key,
                f"at least {self.model_engine}.world_size / rollout.n ({shares} / {n}), "
                "so that each rank has a response in "
                "every optimizer step",
                mini,
            )
        least = self.algorithm.fewest_sessions(n, divergence=self.actor.use_kl_loss)
        require(
            batch * least >= shares,
            f"{path}data.train_batch_size",
            f"at least {self.model_engine}.world_size ({shares}), because algorithm.by_source trains some prompts on one "
            "response, their answer, and each rank needs a response",
            batch,
        )
        require(
            batch <= self.data.train_size or bool(self.data.train_files),
            f"{path}data.train_batch_size",
            f"at most data.train_size ({self.data.train_size})",
            batch,
        )
        workers = self.rollout.num_workers
        require(workers <= batch, f"{path}rollout.num_workers", f"at most data.train_batch_size ({batch})", workers)


def _names_a_folder(name: str) -> bool:
    """Whether a run can have this name; the empty one stands for the time of its start."""
    return not {"/", "\0"} & set(name) and name not in (".", "..") and len(name.encode()) <= LONGEST_NAME
