"""Rollout engine over a transformers model in this process."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from rl_protocol import ConfigError, KeptSets, RolloutError, WeightSyncError, WeightTensor
from rl_protocol.batch.routed_experts import ExpertIds
from rl_protocol.counted import counted
from rl_protocol.ports import Generation, GenerationRequest, Memory, SamplingParams, WeightCapabilities
from rl_protocol.support.host.this_process import give_back_memory
from rl_protocol.torch import TORCH_DTYPES, lent_weight, torch_dtype_name
from rl_trainer.backends.experts.checkpoint_weights import joined_experts
from rl_trainer.backends.experts.routing import ExpertRouting
from rl_trainer.backends.loading import Facts, load_model
from rl_trainer.backends.world import CPU
from rl_trainer.config.lora import LoraConfig
from rl_trainer.rollout.decoding import DecodingBatch, read_prompts
from rl_trainer.rollout.sampling import Sampler
from rl_trainer.rollout.stop_strings import Decode, StopSearch

if TYPE_CHECKING:
    from rl_trainer.backends.peft_lora import MergedAdapter


class HFRolloutEngine:
    """RolloutEngine over a transformers causal language model in this process.

    Args:
        path: Hugging Face checkpoint folder; its weights are version 0.
        max_batch_size: responses generated side by side.
        dtype: element type of the weights and of the computation.
        device: of the weights and of the computation.
        lora: settings of the adapters that the engine takes; it then keeps the float32 weights of
            their modules beside the model. None: it takes whole weights only.
        interruptible: whether the event loop runs between two tokens, so that new weights can be
            loaded during a generation. They end the running responses with the finish reason
            `abort`, and one version generated all tokens of each.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        max_batch_size: int = 512,
        dtype: str = "float32",
        device: torch.device = CPU,
        lora: LoraConfig | None = None,
        interruptible: bool = False,
    ) -> None:
        self._merged: MergedAdapter | None = None
        if lora is None:
            self._model = load_model(path, dtype=TORCH_DTYPES[dtype]).to(device)
        else:
            from rl_trainer.backends.peft_lora import MergedAdapter  # needs the extra `lora`

            whole = load_model(path).to(device)
            self._merged = MergedAdapter(whole, lora)
            self._model = whole.to(TORCH_DTYPES[dtype])
        self._tied = _tied_names(self._model)
        self._path = Path(path)
        self._decode: Decode | None = None
        self._experts: ExpertRouting | None = None
        self._device = device
        self._max_batch_size = max_batch_size
        self._interruptible = interruptible
        self._one_at_a_time = asyncio.Lock()
        self._version = 0
        self._watch: Callable[[], None] | None = None  # set while the weights are borrowed memory
        self._dropped: dict[torch.nn.Parameter, torch.Size] = {}  # during sleep
        self._eos_ids = _eos_ids(self._model)
        self._facts = Facts.of(self._model)

    @property
    def capabilities(self) -> WeightCapabilities:
        """On the CPU it adopts weights; with `lora` it takes adapters, and copies the weights they
        change.

        It drops weights that are a copy of its own and are replaced as a whole.
        """
        whole = self._merged is None
        return WeightCapabilities(
            adapters=not whole,
            adopts=whole and self._device.type == "cpu",
            sleeps=True,
            drops_weights=whole and self._watch is None,
        )

    @property
    def weight_version(self) -> int:
        """Version of the active weights."""
        return self._version

    def load_weights(self, weights: Iterable[WeightTensor], version: int) -> None:
        given = self._whole(weights, version)
        if self._watch is not None:  # borrowed weights are read-only
            self._model.load_state_dict({name: weight.clone() for name, weight in given.items()}, assign=True)
            self._watch = None
        else:
            self._model.load_state_dict(given)
        self._version = version

    def adopt_weights(self, weights: Iterable[WeightTensor], version: int, watch: Callable[[], None]) -> None:
        """Generate with the given memory, read-only, instead of a copy.

        Args:
            weights: as for `load_weights`.
            version: their version.
            watch: raises WeightSyncError once the memory may have been overwritten. Nothing that
                was generated with it is returned after that.

        Raises:
            WeightSyncError: as for `load_weights`.
        """
        self._model.load_state_dict(self._whole(weights, version), assign=True)
        self._version, self._watch = version, watch

    def share_base(self, base: Mapping[str, torch.Tensor]) -> None:
        """Use the frozen weights of a policy with adapters in this process, instead of copies.

        Weights that an adapter changes stay in memory of this engine. An adapter is merged into
        them from `base`, as from the copy, so the result is the same bit by bit, unless `base` was
        rounded.

        Args:
            base: every weight of version 0, by name, on the device of the engine; it never changes.

        Raises:
            WeightSyncError: the engine takes no adapters.
        """
        if self._merged is None:
            raise WeightSyncError("Only a rollout engine made with `lora` shares base weights.")
        self._merged.share(base)
        state: dict[str, torch.Tensor] = self._model.state_dict()
        same = {
            name: weight
            for name, weight in base.items()
            if name not in self._merged.merged and weight.dtype == state[name].dtype
        }
        self._model.load_state_dict(same, strict=False, assign=True)

    async def sleep(self, level: Literal[1, 2] = 1) -> int:
        """Give memory back until `wake`; returns the bytes of the weights that were dropped.

        Keys and values are freed after each call of `generate`, and level 1 returns what the
        allocator still holds of them to the system. Level 2 also drops the weights, if
        `capabilities` say so.

        Raises:
            WeightSyncError: at level 2 these weights can't be dropped.
        """
        freed = 0
        if level == 2:
            if not self.capabilities.drops_weights:
                raise WeightSyncError(
                    "This rollout engine can't drop its weights: they are adopted, or a base of adapters."
                )
            for weight in self._model.parameters():
                self._dropped[weight] = weight.shape
                freed += weight.nbytes
                weight.data = weight.data.new_empty(0)
        give_back_memory()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        return freed

    async def wake(self, part: Memory | None = None) -> None:
        """Allocate dropped weights again, without their values; load them before generating."""
        if part == "kv_cache":
            return
        for weight, shape in self._dropped.items():
            weight.data = weight.data.new_empty(shape)
        self._dropped.clear()

    def _whole(self, weights: Iterable[WeightTensor], version: int) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = self._model.state_dict()
        wanted = {name: (torch_dtype_name(tensor.dtype), tuple(tensor.shape)) for name, tensor in state.items()}
        given = {weight.name: weight for weight in weights}
        # Checkpoints, and so Megatron, have a tied output layer under the name of the embedding.
        given |= {name: given[first] for name, first in self._tied.items() if name not in given and first in given}
        return _checked_weights(given, wanted, version)

    def load_adapter(self, weights: Iterable[WeightTensor], version: int) -> None:
        """Replace the current adapter: merge this one into the weights of version 0.

        Args:
            weights: float32, named as in a PEFT folder (`base_model.model.….lora_A.weight`).
            version: the version of base and adapter together.

        Raises:
            WeightSyncError: the engine takes no adapters, or this one does not fit; nothing was
                changed.
        """
        if self._merged is None:
            raise WeightSyncError(f"Version {version} is an adapter, and this rollout engine was made without `lora`.")
        wanted = {name: ("float32", shape) for name, shape in self._merged.shapes().items()}
        given = _checked_weights({weight.name: weight for weight in weights}, wanted, version)
        adapter = {name: weight.to(self._device) for name, weight in given.items()}
        state: dict[str, torch.Tensor] = self._model.state_dict()
        with torch.no_grad():
            for name, weight in self._merged.weights(adapter):
                state[name].copy_(weight)
        self._version = version

    async def generate(self, requests: Sequence[GenerationRequest], params: SamplingParams) -> list[Generation]:
        """Generate in the calling thread until all requests are done; see RolloutEngine.generate.

        Raises:
            RolloutError: a request is invalid, or adopted weights were overwritten meanwhile.
            ConfigError: `params.stop` is given, and the checkpoint folder has no tokenizer; or
                `params.routed_experts`, and the routers of the model are not known.
        """
        for request in requests:
            self._check(request, params)
        out: list[Generation] = []
        async with self._one_at_a_time:
            for start in range(0, len(requests), self._max_batch_size):
                out.extend(await self._generate_batch(requests[start : start + self._max_batch_size], params))
        self._check_adopted()
        return out

    def _check_adopted(self) -> None:
        if self._watch is None:
            return
        try:
            self._watch()
        except WeightSyncError as error:
            raise RolloutError(
                f"What was generated with version {self._version} is dropped, since its weights were released meanwhile: {error}"
            ) from error

    async def _interrupted(self) -> bool:
        """Let the event loop run, which may load new weights; returns whether it did."""
        if not self._interruptible:
            return False
        version = self._version
        self._check_adopted()
        await asyncio.sleep(0)
        return self._version != version

    def _check(self, request: GenerationRequest, params: SamplingParams) -> None:
        total = len(request.prompt_ids) + params.max_new_tokens
        if not request.prompt_ids:
            raise RolloutError(f"Prompt {request.uid!r} is empty; every prompt needs at least one token.")
        if total > self._facts.context:
            raise RolloutError(
                f"Prompt {request.uid!r} has {len(request.prompt_ids)} tokens; with SamplingParams.max_new_tokens={params.max_new_tokens} "
                f"that is {total}, more than the model's context of {self._facts.context}."
            )
        told = request.prompt_ids.count(self._facts.image_token) if self._facts.image_token is not None else 0
        seen = sum(math.prod(image.grid_thw) for image in request.images) / (self._facts.pieces or 1)
        if told != seen:
            raise RolloutError(
                f"Prompt {request.uid!r} has {counted(told, 'image token')}, and its {counted(len(request.images), 'image')} must have {seen:g}; "
                "a context must begin with the prompt of its row, and only a model that sees images can be shown one."
            )

    async def _generate_batch(self, requests: Sequence[GenerationRequest], params: SamplingParams) -> list[Generation]:
        batch = DecodingBatch(
            self._model,
            read_prompts(self._model, self._facts, requests).to(self._device),
            Sampler(requests, params, self._facts.banned, self._device),
            max_new_tokens=params.max_new_tokens,
            end_ids=(*(() if params.ignore_eos else self._eos_ids), *params.stop_token_ids),
            searches=self._searches(requests, params.stop),
            experts=self._routers() if params.routed_experts else None,
        )
        version = self._version
        while batch.step() and not await self._interrupted():
            pass
        end = "length" if batch.made == params.max_new_tokens else "abort"
        rows = zip(*(column.tolist() for column in batch.result()), strict=True)
        return [
            _generation(tokens, log_probs, kept, batch.routed(row, length or batch.made), length, end, version)
            for row, ((tokens, log_probs, length), kept) in enumerate(zip(rows, batch.kept_sets(), strict=True))
        ]

    def _routers(self) -> ExpertRouting:
        if self._experts is None:
            self._experts = ExpertRouting(self._model)
        return self._experts

    def _searches(self, requests: Sequence[GenerationRequest], stops: tuple[str, ...]) -> list[StopSearch]:
        if not stops:
            return []
        if self._decode is None:
            self._decode = _decoder(self._path)
        return [StopSearch(stops, self._decode, request.prompt_ids) for request in requests]


def _eos_ids(model: Any) -> tuple[int, ...]:
    """The tokens that end a response, of which some models have several."""
    configs = (model.generation_config, model.config)
    eos = next((config.eos_token_id for config in configs if config.eos_token_id is not None), ())
    return (eos,) if isinstance(eos, int) else tuple(eos)


def _generation(
    tokens: list[int],
    log_probs: list[float],
    kept: KeptSets | None,
    routed: ExpertIds | None,
    length: int,
    end: Literal["length", "abort"],
    version: int,
) -> Generation:
    """A response of the first `length` tokens; 0: of all, and then its finish reason is `end`."""
    return Generation(
        response_ids=tuple(tokens[: length or None]),
        log_probs=tuple(log_probs[: length or None]),
        finish_reason="stop" if length else end,
        weight_version=version,
        kept=None if kept is None else kept.head(length or len(tokens)),
        routed=routed,
    )


def _decoder(folder: Path) -> Decode:
    """Decodes with the tokenizer of a checkpoint folder, without special tokens.

    Raises:
        ConfigError: its tokenizer.json can't be read.
    """
    from tokenizers import Tokenizer  # only stop strings need it

    path = folder / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_buffer(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"Stop strings need the model's tokenizer: {path} can't be read: {error}.") from error
    return lambda ids: tokenizer.decode(list(ids), skip_special_tokens=True)


def _tied_names(model: torch.nn.Module) -> dict[str, str]:
    """The names of weights that are those of an earlier name too, with that name."""
    first = dict[int, str]()
    state: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)
    return {name: one for name, weight in state.items() if (one := first.setdefault(id(weight), name)) != name}


def _checked_weights(
    weights: Mapping[str, WeightTensor], wanted: Mapping[str, tuple[str, tuple[int, ...]]], version: int
) -> dict[str, torch.Tensor]:
    """Check that the weights are exactly those wanted, {name: (element type, shape)}.

    Returns:
        The weights by name, without a copy except for those of experts that were given one by one.

    Raises:
        WeightSyncError: a weight is missing, unknown, or has another type or shape.
    """
    given = joined_experts(weights, wanted)
    missing, unknown = sorted(wanted.keys() - given.keys()), sorted(given.keys() - wanted.keys())
    if missing or unknown:
        raise WeightSyncError(
            f"Weights of version {version} do not fit the rollout model: missing {missing[:4]}, unknown {unknown[:4]}."
        )
    for name, weight in given.items():
        if (weight.dtype, weight.shape) != wanted[name]:
            raise WeightSyncError(
                f"Weight {name!r} of version {version} is {weight.dtype} {weight.shape}; the rollout model has {wanted[name]}."
            )
    return {name: lent_weight(weight) for name, weight in given.items()}
