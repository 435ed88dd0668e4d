"""The typed schema of the application's configuration: each component's own settings, and what only the app knows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rl_app_ppo.demo.demos import DEMOS
from rl_app_ppo.layers import NO_PRESET
from rl_ckpt_engine import CheckpointEngineConfig
from rl_trainer import needs_critic
from rl_trainer.combinations import check_combination
from rl_trainer.config import (
    ActorConfig,
    AlgorithmConfig,
    CriticConfig,
    LoopConfig,
    OverlongConfig,
    RolloutConfig,
)
from rl_trainer.engines import ENGINES, FsdpConfig, MegatronConfig, get_engine
from rl_trainer.lora import LoraConfig
from rl_trainer.rewards import parse_terms
from rl_trainer.rewards.described import is_described
from rl_trainer.rewards.loading import HARMLESS
from rl_trainer.settings import group, option, require
from rl_transferqueue import TransferQueueConfig

ON_BAD_ROW = ("error", "skip")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The task and how it is fed: files of prompts, or the demo."""

    train_batch_size: int = option(64, "prompts per step")
    train_files: str = option(
        "",
        "files to train on, comma-separated, with shares as in 0.7*a.jsonl,0.3*b.parquet, or folders of save_to_disk; empty: the demo",
    )
    val_files: str = option(
        "", "files to validate with, likewise, without shares; empty: data.val_split of the rows of train_files"
    )
    val_split: float = option(
        0.1,
        "share of the rows of train_files that is held out for validation where val_files is empty and trainer.test_freq is above 0",
    )
    curriculum: str = option(
        "",
        "order of prompts: sequential, or one installed under rl_trainer.curricula; empty: each epoch shuffled, in the shares of train_files",
    )
    prompt_key: str = option("prompt", "field of a row that holds the prompt: a list of messages, or a text")
    max_prompt_length: int = option(512, "most tokens of a prompt from a file")
    filter_overlong_prompts: bool = option(True, "leave longer prompts out; otherwise they are bad rows")
    on_bad_row: str = option("error", "rows that do not meet the format: error, or skip them and say how many")
    demo: str = option("addition", "demo: its task, " + " or ".join(DEMOS))
    train_size: int = option(4000, "demo: problems in the training split")
    val_size: int = option(512, "demo: problems in the validation split; the splits never overlap")
    seed: int = option(0, "demo: which problems are drawn, into which split they go, and the warm-up of its model")

    def __post_init__(self) -> None:
        require(self.train_batch_size >= 1, "data.train_batch_size", "at least 1", self.train_batch_size)
        require(
            bool(self.files("train")) or not self.files("val"),
            "data.val_files",
            "empty where data.train_files is: the demo has a validation split of its own",
            self.val_files,
        )
        require(0 <= self.val_split < 1, "data.val_split", "in [0, 1)", self.val_split)
        given = {weight is None for _, weight in _weighted(self.train_files)}
        require(len(given) < 2, "data.train_files", "files that all have a share, or none of them", self.train_files)
        require(
            all(weight is None for _, weight in _weighted(self.val_files)),
            "data.val_files",
            "files without shares",
            self.val_files,
        )
        require(
            len(set(self.files("train"))) == len(self.files("train")),
            "data.train_files",
            "different files",
            self.train_files,
        )
        require(
            not (self.curriculum and self.shares()),
            "data.train_files",
            f"files without shares with data.curriculum={self.curriculum!r}, which alone says how often a row comes",
            self.train_files,
        )
        require(bool(self.prompt_key), "data.prompt_key", "the name of a field", self.prompt_key)
        require(self.max_prompt_length >= 1, "data.max_prompt_length", "at least 1", self.max_prompt_length)
        require(self.on_bad_row in ON_BAD_ROW, "data.on_bad_row", f"one of {ON_BAD_ROW}", self.on_bad_row)
        require(self.demo in DEMOS, "data.demo", f"one of {', '.join(DEMOS)}", self.demo)
        require(self.train_size >= 1, "data.train_size", "at least 1", self.train_size)
        require(self.val_size >= 1, "data.val_size", "at least 1", self.val_size)
        require(self.seed >= 0, "data.seed", "at least 0", self.seed)

    def files(self, split: Literal["train", "val"]) -> tuple[str, ...]:
        """Paths of `train_files` or `val_files`."""
        return tuple(name for name, _ in _weighted(self.train_files if split == "train" else self.val_files))

    def shares(self) -> tuple[float, ...] | None:
        """Of each training file in every epoch; None: each is gone through once."""
        found = [weight for _, weight in _weighted(self.train_files)]
        return None if None in found else tuple(weight or 0.0 for weight in found)


def _weighted(text: str) -> list[tuple[str, float | None]]:
    """Comma-separated names, each with the number before its star."""
    found: list[tuple[str, float | None]] = []
    for name in (part.strip() for part in text.split(",") if part.strip()):
        number, _, rest = name.partition("*")
        try:
            found.append((rest.strip(), float(number)) if rest else (name, None))
        except ValueError:
            found.append((name, None))  # a star of the name's own
    return found


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Where the policy starts from."""

    path: str = option(
        "",
        "Hugging Face checkpoint folder, or name of a model in the local Hugging Face cache; empty: the demo model, "
        "made by a short supervised warm-up and cached",
    )
    cache_dir: str = option(
        "~/.cache/rl-app-ppo", "where demo models and prepared data files are kept, by content hash"
    )


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """How responses are scored."""

    function: str = option(
        "exact_match",
        "exact_match, math, gsm8k, countdown, by_data_source, one installed under rl_trainer.rewards, path.py:function, path.toml "
        "(a service or a reward model), or a sum: "
        "0.8*math,0.2*my.py:brief",
    )
    timeout_s: float = option(10.0, "longest time of one call, seconds; then its process is killed and replaced")
    num_workers: int = option(2, "processes of each reward function (exact_match and gsm8k need none)")
    memory_mb: int = option(4096, "address space of each of these processes, MiB")
    overlong: OverlongConfig = group(OverlongConfig, "what overlong responses cost")

    def __post_init__(self) -> None:
        parse_terms(self.function)
        require(self.timeout_s > 0, "reward.timeout_s", "greater than 0", self.timeout_s)
        require(self.num_workers >= 1, "reward.num_workers", "at least 1", self.num_workers)
        require(self.memory_mb >= 256, "reward.memory_mb", "at least 256, which Python itself needs", self.memory_mb)

    @property
    def isolated(self) -> bool:
        """Whether any function runs in processes of its own."""
        return any(not is_described(name) for name in self._limited())

    @property
    def timed(self) -> bool:
        """Whether calls of any function have a limit of time."""
        return bool(self._limited())

    def _limited(self) -> list[str]:
        return [term.name for term in parse_terms(self.function) if term.name not in HARMLESS]


@dataclass(frozen=True, kw_only=True)
class GenerationConfig(RolloutConfig):
    """How responses are generated, and by what."""

    name: str = option("hf", "what generates: hf (transformers), or vllm (its extra is installed apart)")
    kv_cache_mb: int = option(256, "memory of each vLLM replica for keys and values, MiB")
    tensor_model_parallel_size: int = option(1, "processes of each vLLM replica that share every layer")

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.name in ("hf", "vllm"), "rollout.name", "hf or vllm", self.name)
        for name in ("kv_cache_mb", "tensor_model_parallel_size"):
            require(getattr(self, name) >= 1, f"rollout.{name}", "at least 1", getattr(self, name))


@dataclass(frozen=True, kw_only=True)
class TrainerConfig(LoopConfig):
    """The run and what it writes."""

    total_epochs: int = option(
        0, "most passes over the training data, each of as many steps as there are whole batches; 0: steps alone count"
    )
    output_dir: str = option("outputs", "folder in which each run gets a folder of its own")
    run_name: str = option("", "name of that folder; empty: date, time, algorithm and seed")
    resume_mode: str = option(
        "disable",
        "disable: a new run; auto: go on in the run folder from its newest whole checkpoint; or a checkpoint to start a new run from",
    )
    max_ckpt_to_keep: int = option(3, "newest checkpoints that are kept, beside the best one; 0: all")
    logger: str = option(
        "console,tensorboard",
        "where metrics go beside metrics.jsonl: comma-separated console, tensorboard, wandb, mlflow, trackio, or installed under rl_app_ppo.sinks",
    )
    hooks: str = option("", "comma-separated hooks that are told what happens, installed under rl_trainer.hooks")
    profile_steps: str = option(
        "", "comma-separated steps that every process with a model profiles with torch, into profile/ of the run folder"
    )
    min_free_disk_mb: int = option(100, "refuse to start with less free space than this in output_dir")
    threads_per_worker: int = option(1, "compute threads of each worker process")

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.total_epochs >= 0, "trainer.total_epochs", "at least 0", self.total_epochs)
        require(
            self.total_training_steps >= 0 or self.total_epochs >= 1,
            "trainer.total_training_steps",
            "at least 0 without trainer.total_epochs",
            self.total_training_steps,
        )
        require(bool(self.output_dir), "trainer.output_dir", "a folder", self.output_dir)
        require("/" not in self.run_name, "trainer.run_name", "a name without slashes", self.run_name)
        require(bool(self.resume_mode), "trainer.resume_mode", "disable, auto or a folder", self.resume_mode)
        require(
            self.resume_mode != "auto" or bool(self.run_name),
            "trainer.run_name",
            "given with trainer.resume_mode=auto, so that the run to go on with is known",
            self.run_name,
        )
        self.profiled()
        require(self.max_ckpt_to_keep >= 0, "trainer.max_ckpt_to_keep", "at least 0", self.max_ckpt_to_keep)
        require(self.min_free_disk_mb >= 0, "trainer.min_free_disk_mb", "at least 0", self.min_free_disk_mb)
        require(self.threads_per_worker >= 1, "trainer.threads_per_worker", "at least 1", self.threads_per_worker)

    def profiled(self) -> frozenset[int]:
        """`profile_steps`, parsed."""
        words = [word.strip() for word in self.profile_steps.split(",") if word.strip()]
        good = all(word.isdecimal() and int(word) >= 1 for word in words)
        require(good, "trainer.profile_steps", "steps such as 2,5, the first being 1", self.profile_steps)
        return frozenset(map(int, words))


LOCAL = "local"
"""Value of ray.address: a Ray of the run's own."""


@dataclass(frozen=True, kw_only=True)
class RayConfig:
    """The Ray cluster that hosts the workers."""

    address: str = option(
        LOCAL, "local: start Ray on this machine and stop it at the end; auto or host:port: join a cluster"
    )
    start_timeout_s: float = option(120.0, "longest wait for Ray and for the workers to start, seconds")
    cpus_per_worker: float = option(0.0, "CPUs Ray reserves for each worker process; 0: they share what there is")

    def __post_init__(self) -> None:
        require(bool(self.address), "ray.address", "local, auto or host:port", self.address)
        require(self.start_timeout_s > 0, "ray.start_timeout_s", "greater than 0", self.start_timeout_s)
        require(self.cpus_per_worker >= 0, "ray.cpus_per_worker", "at least 0", self.cpus_per_worker)


@dataclass(frozen=True, kw_only=True)
class AppConfig:
    """Everything `uv run apps/ppo` can be told."""

    preset: str = option(
        "",
        f"demo, demo-ppo or demo-calculator: values for the model and task of that demo; or {NO_PRESET}. Empty: the demo of the algorithm where "
        f"data.train_files is empty, {NO_PRESET} elsewhere",
    )
    model_engine: str = option("torch", "what trains the models: " + ", ".join(ENGINES))
    algorithm: AlgorithmConfig = group(AlgorithmConfig, "advantages")
    data: DataConfig = group(DataConfig, "task and batches")
    model: ModelConfig = group(ModelConfig, "initial policy")
    lora: LoraConfig = group(LoraConfig, "adapters in place of all weights")
    fsdp: FsdpConfig = group(FsdpConfig, "FSDP2")
    megatron: MegatronConfig = group(MegatronConfig, "Megatron-Core")
    reward: RewardConfig = group(RewardConfig, "scoring")
    actor: ActorConfig = group(ActorConfig, "policy training")
    critic: CriticConfig = group(CriticConfig, "value training")
    rollout: GenerationConfig = group(GenerationConfig, "generation")
    transfer_queue: TransferQueueConfig = group(TransferQueueConfig, "data plane")
    checkpoint_engine: CheckpointEngineConfig = group(CheckpointEngineConfig, "weight synchronisation")
    trainer: TrainerConfig = group(TrainerConfig, "loop and outputs")
    ray: RayConfig = group(RayConfig, "processes")

    @property
    def ranks(self) -> int:
        """Processes that share each trained model."""
        return {"fsdp": self.fsdp.world_size, "megatron": self.megatron.ranks}.get(self.model_engine, 1)

    @property
    def holds_out(self) -> bool:
        """Whether rows of the training files are held out for validation."""
        data = self.data
        return bool(data.train_files and not data.val_files and data.val_split and self.trainer.test_freq)

    @property
    def sends_adapters(self) -> bool:
        """Whether adapters alone travel to the rollout, which has had the base since it started."""
        return self.lora.rank > 0 and not self.lora.merge

    @property
    def replicas(self) -> tuple[int, ...]:
        """Of each rank of the actor the number of its share of the rows: ranks of one replica of the model compute with the same ones."""
        return tuple(
            self.megatron.replica(rank) if self.model_engine == "megatron" else rank for rank in range(self.ranks)
        )

    def __post_init__(self) -> None:
        get_engine(self.model_engine)
        check_combination(self.algorithm, self.actor, self.rollout.n)
        self._check_batches()
        longest = self.rollout.response_length
        require(
            self.reward.overlong.buffer_len <= longest,
            "reward.overlong.buffer_len",
            f"at most rollout.response_length ({longest})",
            self.reward.overlong.buffer_len,
        )
        require(
            self.rollout.n >= 2 or not self.algorithm.filter_groups.enable,
            "rollout.n",
            "at least 2 with algorithm.filter_groups.enable=true, which compares the responses of a prompt",
            self.rollout.n,
        )

    def _check_batches(self) -> None:
        batch, n, shares = self.data.train_batch_size, self.rollout.n, len(set(self.replicas))
        minis = {"actor.ppo_mini_batch_size": self.actor.ppo_mini_batch_size}
        if needs_critic(self.algorithm):
            minis["critic.ppo_mini_batch_size"] = self.critic.ppo_mini_batch_size
        for key, mini in minis.items():
            require(batch % mini == 0, "data.train_batch_size", f"divisible by {key} ({mini})", batch)
            require(
                mini * n >= shares,
                key,
                f"at least {get_engine(self.model_engine).group}.world_size / rollout.n ({shares} / {n}), so that each rank has a response in "
                "every optimizer step",
                mini,
            )
        require(
            batch <= self.data.train_size or bool(self.data.train_files),
            "data.train_batch_size",
            f"at most data.train_size ({self.data.train_size})",
            batch,
        )
        workers = self.rollout.num_workers
        require(workers <= batch, "rollout.num_workers", f"at most data.train_batch_size ({batch})", workers)
