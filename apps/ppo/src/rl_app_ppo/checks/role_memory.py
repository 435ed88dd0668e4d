"""Estimates of the memory of each role of a process, for the checks before a run and for --plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from rl_app_ppo.config.placement import Role, critic_shares_base, shares_base, shares_weights
from rl_app_ppo.config.schema import AppConfig
from rl_app_ppo.demo.settings import ModelSettings
from rl_rollout_vllm import CPU_KV_CACHE
from rl_trainer.config import ActorConfig, CriticConfig
from rl_trainer.config.backends import FsdpConfig, MegatronConfig, TorchConfig

LOGITS_CHUNK = 64 << 20
"""Largest float32 logits that a pass computes at once (`rl_trainer.algorithms.log_probs`)."""
_LOGITS_COPIES = 4
"""Logits, log-probs, probabilities and their gradient."""
_CHUNK_COPIES = 3
"""Log-probs, probabilities or their gradient, and two in bfloat16 (logits, gradient) or none."""
_KERNELS = 80 << 20
"""Scratch memory and code of kernels on the CPU, and pages of the allocator between tensors."""
_FORWARD = 40 << 20
"""`_KERNELS` of forward passes alone."""


@dataclass(frozen=True, slots=True)
class TowerSize:
    """Sizes of the vision tower of a model.

    Attributes:
        weights: elements of all its weights; they are trained as the others are.
        layers: repeated blocks.
        hidden: elements of a patch between blocks.
        pieces: patches of an image that become one token.
        numbers: float32 numbers of a patch.
        activations: as those of ModelSize, for patches per pass and bytes per element.
    """

    weights: int
    layers: int
    hidden: int
    pieces: int
    numbers: int
    activations: Callable[[int, int], int]

    def image_bytes(self, tokens: int) -> int:
        """Bytes of the images that become so many tokens, as a policy reads them."""
        return 4 * self.numbers * self.pieces * tokens


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Sizes of a model.

    Attributes:
        weights: elements of all weights; tied ones count once.
        trained: elements of those that are trained: the adapters with LoRA.
        kv_token: elements of the keys and values of a token.
        layers: repeated blocks, without those of the vision tower.
        outside: elements of the weights outside of the blocks, such as embeddings.
        blocks: elements of the weights of the repeated blocks, without those of the vision tower.
        head: elements of an output layer that shares no weights with the embeddings; else 0.
        hidden: elements of a token between blocks.
        vocabulary: logits of a token.
        chunked: whether passes compute logits in chunks; else they hold those of all tokens.
        activations: bytes that the forward pass of a training step keeps for its backward pass,
            without logits, for tokens per pass and bytes per element.
        experts: elements of the weights of experts.
        expert_adapters: elements of the adapters of experts.
        vision: the vision tower; None: the model reads text alone.
    """

    weights: int
    trained: int
    kv_token: int
    layers: int
    outside: int
    blocks: int
    head: int
    hidden: int
    vocabulary: int
    chunked: bool
    activations: Callable[[int, int], int]
    experts: int = 0
    expert_adapters: int = 0
    vision: TowerSize | None = None

    @property
    def body(self) -> ModelSize:
        """The sizes without the output layer: those of a critic."""
        return replace(self, weights=self.weights - self.head, outside=self.outside - self.head, head=0)


def lasting_bytes(role: Role, config: AppConfig, weights: int, trained: int, *, on_gpu: bool = False) -> dict[str, int]:
    """Part of the memory -> bytes in each process of a role, of what does not depend on tokens.

    Args:
        role: a reward model's memory is not counted.
        config: the configuration of the run.
        weights, trained: as in ModelSize; a critic without LoRA trains all weights.
        on_gpu: whether the role computes on a GPU; new weights then wait in the host's memory.
    """
    match role:
        case "actor" | "critic":
            adapters = role == "actor" or config.critic.use_lora
            held = 0 if role == "critic" and critic_shares_base(config) else weights
            return _trained(config, held, trained if adapters else weights)
        case "ref":
            return {"weights": _weights(config, weights, 0)}
        case "rollout":
            return _copies(config, weights, on_gpu=on_gpu)
        case "reward":
            return {}


def host_parts(role: Role, config: AppConfig) -> frozenset[str]:
    """The parts of `lasting_bytes` that a role on a GPU keeps in host memory."""
    offloads = (
        isinstance(config.engine, FsdpConfig) and config.engine.cpu_offload and role in ("actor", "critic", "ref")
    )
    return frozenset(("weights", "gradients", "optimizer") if offloads else ())


def role_bytes(
    role: Role, config: AppConfig, size: ModelSize, *, image_tokens: int = 0, on_gpu: bool = False
) -> Mapping[str, int]:
    """`lasting_bytes`, and the most that passes and caches take.

    Of the images that a rollout reads it counts nothing.

    Args:
        role: as in `lasting_bytes`.
        config: the configuration of the run.
        size: of the role's model.
        image_tokens: most tokens of a prompt that stand for images.
        on_gpu: as in `lasting_bytes`.
    """
    size = held_size(role, config, size)
    lasting = lasting_bytes(role, config, size.weights, size.trained, on_gpu=on_gpu)
    match role:
        case "actor" | "critic":
            options = config.actor if role == "actor" else config.critic
            of_pass = _Pass.of(config, options, size, image_tokens)
            return lasting | _update(config, of_pass, lasting["gradients"], logits=role == "actor", on_gpu=on_gpu)
        case "ref":
            return lasting | _reference(config, _Pass.of(config, config.actor, size, image_tokens), on_gpu=on_gpu)
        case "rollout":
            return lasting | _cache(config, size, on_gpu=on_gpu)
        case "reward":
            return lasting


def held_size(role: Role, config: AppConfig, size: ModelSize) -> ModelSize:
    """The sizes without what a role does not have: the output layer of a critic, the experts that
    other replicas of a trained model hold, and with Megatron-Core logits in chunks."""
    size = size.body if role == "critic" else size
    if role == "rollout" or not isinstance(config.engine, MegatronConfig):
        return size
    ways = config.engine.expert_model_parallel_size
    held = size.weights - size.experts + size.experts // ways
    adapters = size.trained - size.expert_adapters + size.expert_adapters // ways
    trained = held if size.trained == size.weights else adapters
    return replace(size, weights=held, trained=trained, chunked=False)


def _trained(config: AppConfig, weights: int, trained: int) -> dict[str, int]:
    """Weights, their float32 gradients, and AdamW's two moments."""
    copied = _copied(config) and not isinstance(config.engine, MegatronConfig)  # its adapters compute in float32
    part, adapters = _shards(config), 0 if trained == weights else (4 + 2 * copied) * trained
    return {
        "weights": _weights(config, weights, trained) + adapters // part,
        "gradients": 4 * trained // part,
        "optimizer": 8 * trained // part,
    }


@dataclass(frozen=True, slots=True)
class _Pass:
    """The largest pass of a role.

    Attributes:
        size: of the model.
        tokens, patches: that it reads.
        element: bytes of an element of the computation.
        of_tokens, of_patches: bytes that its forward pass keeps for the backward pass, without
            logits.
    """

    size: ModelSize
    tokens: int
    patches: int
    element: int
    of_tokens: int
    of_patches: int

    @classmethod
    def of(cls, config: AppConfig, options: ActorConfig | CriticConfig, size: ModelSize, image_tokens: int) -> _Pass:
        """The largest pass of an actor or a critic, or of a reference with the settings of one."""
        tokens, element, tower = _pass_tokens(config, options), _element(config), size.vision
        sequences = -(-tokens // _longest(config))
        patches = sequences * image_tokens * tower.pieces if tower else 0
        of_patches = tower.activations(patches, element) if tower and patches else 0
        return cls(size, tokens, patches, element, size.activations(tokens, element), of_patches)

    @property
    def layer(self) -> int:
        """Bytes that the layer keeps that keeps most."""
        tower = self.size.vision
        return max(self.of_tokens // self.size.layers, self.of_patches // tower.layers if tower else 0)

    @property
    def between(self) -> int:
        """Bytes of what lies between layers."""
        tower = self.size.vision
        patches = tower.layers * tower.hidden * self.patches if tower else 0
        return self.element * (self.size.layers * self.size.hidden * self.tokens + patches)

    @property
    def images(self) -> dict[str, int]:
        """Images of the batch, and in the pass."""
        tower = self.size.vision
        return {"images": 2 * tower.image_bytes(self.patches // tower.pieces)} if tower and self.patches else {}


def _update(config: AppConfig, of_pass: _Pass, gradients: int, *, logits: bool, on_gpu: bool) -> dict[str, int]:
    """Activations, images and logits of the largest pass of an update."""
    size = of_pass.size
    parts = _gathered(config, size) | {"activations": _activations(config, of_pass)} | of_pass.images
    if logits:
        parts["logits"] = _logits(size, of_pass.tokens)
    if on_gpu:
        return parts
    passing = min(gradients, 2 * of_pass.element * size.outside) if _moves_gradients(config) else gradients
    return parts | {"allocator": passing + of_pass.layer + _KERNELS}  # the gradients of a layer are there as well


def _reference(config: AppConfig, of_pass: _Pass, *, on_gpu: bool) -> dict[str, int]:
    """The part of a pass without gradients that takes most: FSDP2 gathers the weights outside of
    blocks, or a block computes, or logits are computed."""
    size, element = of_pass.size, of_pass.element
    outside = block = 0
    if isinstance(config.engine, FsdpConfig):
        outside, block = element * size.outside, element * size.blocks // size.layers
    parts = (
        {"gathered weights": 2 * outside},
        {"gathered weights": outside + 2 * block, "activations": of_pass.layer},
        {"gathered weights": outside, "logits": _logits(size, of_pass.tokens)},
    )
    largest = max(parts, key=lambda part: sum(part.values())) | of_pass.images
    held = {name: nbytes for name, nbytes in largest.items() if nbytes}
    return held if on_gpu else held | {"allocator": _FORWARD}


def _gathered(config: AppConfig, size: ModelSize) -> dict[str, int]:
    """FSDP2's whole weights of a block and of all outside of blocks, cast and then gathered."""
    if not isinstance(config.engine, FsdpConfig):
        return {}
    block = size.blocks // size.layers
    return {"gathered weights": _element(config) * (2 * size.outside + block)}


def _activations(config: AppConfig, of_pass: _Pass) -> int:
    engine = config.engine
    if isinstance(engine, TorchConfig | FsdpConfig) and engine.activation_checkpointing:
        return of_pass.layer + of_pass.between
    kept = of_pass.of_tokens + of_pass.of_patches
    return kept // engine.replica_size if isinstance(engine, MegatronConfig) else kept


def _logits(size: ModelSize, tokens: int) -> int:
    """Float32 logits of a pass at a time, and what is computed from them."""
    every = 4 * tokens * size.vocabulary
    return _CHUNK_COPIES * LOGITS_CHUNK if size.chunked and every > LOGITS_CHUNK else _LOGITS_COPIES * every


def _pass_tokens(config: AppConfig, options: ActorConfig | CriticConfig) -> int:
    """Most tokens of a pass, where every sequence is as long as allowed."""
    if options.ppo_max_token_len:
        return options.ppo_max_token_len
    replicas, longest = len(set(config.replicas)), _longest(config)
    if options.ppo_micro_batch_size:
        return options.ppo_micro_batch_size * longest
    every = -(-options.ppo_mini_batch_size * config.rollout.n // replicas) * longest
    return min(every, max(options.pass_tokens, longest))


def _element(config: AppConfig) -> int:
    """Bytes of an element of the computation."""
    return 2 if config.engine.computes_in == "bfloat16" else 4


def _weights(config: AppConfig, weights: int, trained: int) -> int:
    """Weights of a rank: float32, and a bfloat16 copy where it computes in one; frozen ones have
    the element type of the computation."""
    each = _element(config) if trained < weights else 4 + 2 * _copied(config)
    return each * weights // _shards(config)


def _copied(config: AppConfig) -> bool:
    """Whether bfloat16 copies of the weights compute."""
    return config.engine.computes_in == "bfloat16" and not isinstance(config.engine, FsdpConfig)


def _moves_gradients(config: AppConfig) -> bool:
    """Whether each weight's gradient is moved to float32 as soon as it is there; at most those of
    the input and the output embedding are then there as well."""
    return isinstance(config.engine, TorchConfig) and _copied(config)


def _shards(config: AppConfig) -> int:
    """Ranks over which the weights of a model are divided."""
    engine = config.engine
    return engine.replica_size if isinstance(engine, MegatronConfig) else engine.ranks


def sent_bytes(config: AppConfig, size: ModelSize) -> int:
    """Bytes of the weights, or adapters, that a replica of the rollout receives after a step."""
    if not config.checkpoint_engine.enabled or shares_weights(config):
        return 0
    return 4 * size.trained if config.sends_adapters else _rollout_element(config) * size.weights


def _rollout_element(config: AppConfig) -> int:
    """Bytes of a weight of the rollout."""
    return 2 if config.rollout.dtype == "bfloat16" else 4


def _copies(config: AppConfig, weights: int, *, on_gpu: bool) -> dict[str, int]:
    """Weights of a replica, over all of its tensor-parallel processes, and those that arrive."""
    synced = config.checkpoint_engine.enabled
    whole = _rollout_element(config) * weights
    if shares_base(config):
        return {"adapted weights": whole}
    parts = {} if shares_weights(config) and not on_gpu else {"weights": whole}
    if on_gpu or not synced or shares_weights(config):
        return parts
    if config.sends_adapters:  # those without adapters, beside those that generate
        return parts | {"base weights": 4 * weights}
    return parts | {"arriving weights": whole}


def _cache(config: AppConfig, size: ModelSize, *, on_gpu: bool) -> dict[str, int]:
    """Keys and values of the tokens of a replica."""
    rollout = config.rollout
    if rollout.name == "vllm":
        cache = rollout.kv_cache_mb << 20 or (0 if on_gpu else CPU_KV_CACHE)  # a GPU's is what weights leave
        return {"KV cache": cache} if cache else {}
    tokens = min(rollout.max_batch_size, config.data.train_batch_size * rollout.n) * _longest(config)
    return {"KV cache": _rollout_element(config) * size.kv_token * tokens}


def _longest(config: AppConfig) -> int:
    """Most tokens of a prompt and its response."""
    if not config.data.train_files:
        return ModelSettings().context
    return config.data.max_prompt_length + config.rollout.response_length
