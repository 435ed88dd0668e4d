"""Training backends by name: their options, their defaults, and where they are built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from rl_protocol import ConfigError
from rl_protocol.support.options import group, nearest
from rl_trainer.config.backends import EngineConfig, FsdpConfig, MegatronConfig, TorchConfig

T = TypeVar("T")
COMPUTE_SETTINGS = ("ppo_micro_batch_size", "ppo_max_token_len", "use_remove_padding")
"""Settings of actor and critic that change how a step is computed, but not its result."""


@dataclass(frozen=True, kw_only=True)
class TrainingBackendSpec:
    """A training backend: one row declares all that the app knows of it.

    Attributes:
        name: value of `model_engine`, and the group of settings that only it reads.
        help: meaning of that group.
        options: that group, which also declares ranks, device and checks of the machine.
        build: `module:function` of a `rl_app_ppo.worker.build.Builder`, imported by the workers.
        verl: verl's counterpart of the group.
        defaults: options of ActorConfig and CriticConfig whose default differs with this backend.
            Only options that change how a step is computed: results are the same with every
            backend.
        extra: extra of this app that installs `packages`; empty: none is needed.
        packages: distributions that it needs beyond those of the app.
        sum_pi_squared: its policies can compute that column.
        finds_top_tokens: it supports ActorConfig.kl_loss_topk.
        averages_weights: it supports AlgorithmConfig.teacher_ema.
        packs_sequences: it can join the sequences of a forward pass.
        images: it trains models that see images.
        lends_weights: where a model has one rank, its weights are given out without a copy.
        lends_base: a rollout in the actor's process may use its frozen base weights.
        state: engines of one kind of state read each other's checkpoints; empty: its own kind.

    Raises:
        ConfigError: a default for an option that no backend may change.
    """

    name: str
    help: str
    options: type[EngineConfig]
    build: str
    verl: str | tuple[str, ...] = ()
    defaults: Mapping[str, object] = field(default_factory=dict[str, object])
    extra: str = ""
    packages: tuple[str, ...] = ()
    sum_pi_squared: bool = True
    finds_top_tokens: bool = True
    averages_weights: bool = True
    packs_sequences: bool = True
    images: bool = False
    lends_weights: bool = True
    lends_base: bool = False
    state: str = ""

    def reads_state_of(self, other: TrainingBackendSpec) -> bool:
        """Whether it continues from a checkpoint of the other."""
        return (self.state or self.name) == (other.state or other.name)

    def __post_init__(self) -> None:
        for name in self.defaults:
            if name not in COMPUTE_SETTINGS:
                raise ConfigError(
                    f"TrainingBackendSpec.defaults of {self.name!r} may have {', '.join(COMPUTE_SETTINGS)}; got {name}, "
                    "which means the same with every backend."
                )


_PACKED = {"use_remove_padding": True}
TRAINING_BACKENDS: Mapping[str, TrainingBackendSpec] = {
    engine.name: engine
    for engine in (
        TrainingBackendSpec(
            name="torch",
            help="one process",
            options=TorchConfig,
            build="rl_app_ppo.worker.build:build_torch",
            defaults=_PACKED,
            images=True,
            lends_base=True,
            state="torch",
        ),
        TrainingBackendSpec(
            name="fsdp",
            help="FSDP2",
            options=FsdpConfig,
            build="rl_app_ppo.worker.build:build_fsdp",
            verl="actor_rollout_ref.actor.fsdp_config",
            defaults=_PACKED,
            images=True,
            state="torch",
        ),
        TrainingBackendSpec(
            name="megatron",
            help="Megatron-Core",
            options=MegatronConfig,
            build="rl_app_ppo.worker.megatron:build_megatron",
            verl="actor_rollout_ref.actor.megatron",
            extra="megatron",
            packages=("rl-megatron-peft", "megatron-core"),
            sum_pi_squared=False,
            finds_top_tokens=False,
            averages_weights=False,
            packs_sequences=False,
            lends_weights=False,
        ),
    )
}
"""A new engine is one row here."""


def get_training_backend(name: str) -> TrainingBackendSpec:
    """The training backend of that name.

    Raises:
        ConfigError: there is none; names the nearest.
    """
    if name not in TRAINING_BACKENDS:
        raise ConfigError(
            f"model_engine must be one of {', '.join(TRAINING_BACKENDS)}; got {name!r}.{nearest(name, TRAINING_BACKENDS)}",
        )
    return TRAINING_BACKENDS[name]


def with_engine_groups(kind: type[T]) -> type[T]:
    """Add a group of options for each engine to a class that becomes a dataclass, after `lora`."""
    fields: dict[str, object] = {}
    for name, hint in kind.__annotations__.items():
        fields[name] = hint
        if name == "lora":
            for spec in TRAINING_BACKENDS.values():
                fields[spec.name] = spec.options
                needs = f"model_engine={spec.name}"
                setattr(kind, spec.name, group(spec.options, spec.help, needs=needs, resume="free", verl=spec.verl))
    kind.__annotations__ = fields
    return kind
