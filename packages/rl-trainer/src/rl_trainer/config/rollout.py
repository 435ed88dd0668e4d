"""Options of the rollout: how responses are generated."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rl_protocol.ports import SamplingParams
from rl_protocol.support.options import Options, group, option, require
from rl_trainer.config.agent import AgentConfig

ROUTERS = ("even", "least_loaded", "prefix_sticky")


@dataclass(frozen=True, kw_only=True)
class ValidationSampling(Options):
    """How validation responses are sampled."""

    n: int = option(1, "responses per validation prompt", ge=1, verl=".")
    temperature: float = option(0.0, "0: greedy", ge=0, lt=math.inf)


@dataclass(frozen=True, kw_only=True)
class RolloutConfig(Options):
    """How responses are generated."""

    num_workers: int = option(
        2,
        "rollout replicas, one process each, or one in the process of each actor rank (placement)",
        ge=1,
        resume="free",
    )
    router: str = option("even", "which replica gets which prompts", choices=ROUTERS, needs="num_workers>1")
    n: int = option(8, "responses per prompt", ge=1, verl=".")
    temperature: float = option(1.0, "divides the logits before sampling", gt=0, lt=math.inf, verl=".")
    top_p: float = option(
        1.0, "sample from the smallest set of tokens with this much probability", gt=0, le=1, verl="."
    )
    top_k: int = option(0, "sample from this many most likely tokens; 0: all", ge=0)
    sampling_replay: bool = option(
        True,
        "log-probs of rollout, actor and reference are over the tokens that top_p and top_k kept, so that ratios compare the "
        "distributions that were sampled from; false: over all tokens",
        needs="top_p!=1.0 or top_k>0",
    )
    response_length: int = option(512, "most tokens per response", ge=1, verl=(".", "data.max_response_length"))
    session: str = option("single_turn", "how a session runs", plugins="rl_trainer.sessions")
    agent: AgentConfig = group(AgentConfig, "the policy calls tools", needs="session=tool_agent")
    stop: tuple[str, ...] = option(
        (), "strings that end a response; the token that completes one is kept, and rewards see it"
    )
    stop_token_ids: tuple[int, ...] = option((), "tokens that end a response, besides the end of sequence", ge=0)
    ignore_eos: bool = option(False, "do not stop at the end-of-sequence token", verl=".")
    max_batch_size: int = option(512, "responses generated side by side in one replica", ge=1, resume="free")
    dtype: str = option(
        "float32",
        "type in which replicas compute; weights are rounded to it before they are sent",
        choices=("float32", "bfloat16"),
    )
    val_kwargs: ValidationSampling = group(ValidationSampling, "sampling for validation", resume="free", verl=".")

    def check(self, path: str) -> None:
        require("" not in self.stop, path + "stop", "without empty strings", self.stop)

    @property
    def records_kept_sets(self) -> bool:
        """Whether responses are sampled from a part of the tokens, and log-probs are over these."""
        return self.sampling_replay and (self.top_p < 1 or self.top_k > 0)

    def sampling(self, seed: int = 0, *, routed_experts: bool = False) -> SamplingParams:
        """How training responses are sampled; `seed` is that of the run, `routed_experts` whether
        the experts of each token are recorded.
        """
        return SamplingParams(
            max_new_tokens=self.response_length,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            ignore_eos=self.ignore_eos,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            seed=seed,
            kept_sets=self.records_kept_sets,
            routed_experts=routed_experts,
        )
