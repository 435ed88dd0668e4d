"""Conformance suite of RolloutEngine: subclass it and override `open_engine`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import numpy as np
import pytest

from rl_protocol.batch.weight_tensor import WeightTensor
from rl_protocol.errors import RolloutError, WeightSyncError
from rl_protocol.ports import Generation, GenerationRequest, RolloutEngine, SamplingParams
from rl_protocol.testing.weights_suite import WeightReceiverSuite

TOLERANCE = 1e-3
"""Tolerance for log-probs of one response in different batches, where floats are added in another
order."""


class RolloutEngineSuite(WeightReceiverSuite):
    """Tests for a RolloutEngine. The model must not be deterministic: some token's probability is
    well below 1."""

    requests: Sequence[GenerationRequest] = tuple(
        GenerationRequest(uid=f"p{i}", session=i % 2, prompt_ids=tuple(2 + (i + k) % 4 for k in range(1 + i % 3)))
        for i in range(6)
    )
    """Prompts of different lengths over token ids 2..5; override if the model lacks them."""
    max_new_tokens: int = 6
    decode: Callable[[Sequence[int]], str] | None = None
    """Text of token ids, without special tokens; None: the engine is not given stop strings."""

    def open_engine(self) -> AbstractContextManager[tuple[RolloutEngine, Sequence[WeightTensor]]]:
        """A new engine, and weights that fit it and differ from its own."""
        raise NotImplementedError

    def open_receiver(self) -> AbstractContextManager[tuple[RolloutEngine, Sequence[WeightTensor]]]:
        """The engine."""
        return self.open_engine()

    def generate(
        self,
        engine: RolloutEngine,
        requests: Sequence[GenerationRequest] | None = None,
        *,
        temperature: float = 1.0,
        seed: int = 0,
        ignore_eos: bool = False,
        stop: Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
    ) -> list[Generation]:
        """Generate for these requests (default: all) and check the invariants of each
        generation."""
        requests = self.requests if requests is None else requests
        params = SamplingParams(
            max_new_tokens=self.max_new_tokens,
            temperature=temperature,
            seed=seed,
            ignore_eos=ignore_eos,
            stop=tuple(stop),
            stop_token_ids=tuple(stop_token_ids),
        )
        generations = asyncio.run(engine.generate(requests, params))
        assert len(generations) == len(requests)
        for generation in generations:
            assert 1 <= len(generation.response_ids) <= self.max_new_tokens
            assert len(generation.log_probs) == len(generation.response_ids)
            assert all(np.isfinite(p) and p <= 1e-6 for p in generation.log_probs)
            assert generation.finish_reason == "stop" or len(generation.response_ids) == self.max_new_tokens
            assert generation.weight_version == engine.weight_version
        return generations

    def same(self, got: Sequence[Generation], want: Sequence[Generation]) -> None:
        """Equal tokens, and log-probs equal within rounding."""
        assert [g.response_ids for g in got] == [g.response_ids for g in want]
        assert [g.finish_reason for g in got] == [g.finish_reason for g in want]
        for a, b in zip(got, want, strict=True):
            assert a.log_probs == pytest.approx(b.log_probs, abs=TOLERANCE)

    def test_one_generation_per_request_in_order(self) -> None:
        with self.open_engine() as (engine, _):
            assert self.generate(engine, []) == []
            assert len(self.generate(engine)) == len(self.requests)

    def test_a_cancelled_call_disturbs_no_other(self) -> None:
        params = SamplingParams(max_new_tokens=self.max_new_tokens)

        async def cut(engine: RolloutEngine) -> None:
            running = asyncio.create_task(engine.generate(self.requests, params))
            await asyncio.sleep(0)
            running.cancel()
            await asyncio.wait([running])

        with self.open_engine() as (engine, _):
            whole = self.generate(engine)
            asyncio.run(cut(engine))
            self.same(self.generate(engine), whole)

    def test_batches_and_order_do_not_matter(self) -> None:
        with self.open_engine() as (engine, _):
            together = self.generate(engine)
            self.same([self.generate(engine, [request])[0] for request in self.requests], together)
            self.same(self.generate(engine, self.requests[::-1])[::-1], together)

    def test_chance_comes_from_seed_uid_and_session(self) -> None:
        with self.open_engine() as (engine, _):
            same_prompt = [
                GenerationRequest(uid=uid, session=session, prompt_ids=self.requests[0].prompt_ids)
                for uid in ("a", "b")
                for session in range(8)
            ]
            first = self.generate(engine, same_prompt)
            self.same(self.generate(engine, same_prompt), first)
            assert len({g.response_ids for g in first[:8]}) > 1
            assert [g.response_ids for g in first[:8]] != [g.response_ids for g in first[8:]]
            other = self.generate(engine, same_prompt, seed=1)
            assert [g.response_ids for g in other] != [g.response_ids for g in first]

    def test_greedy_needs_no_seed(self) -> None:
        with self.open_engine() as (engine, _):
            first = self.generate(engine, temperature=0)
            self.same(self.generate(engine, temperature=0, seed=5), first)

    def test_ignore_eos_generates_to_the_end(self) -> None:
        with self.open_engine() as (engine, _):
            for generation in self.generate(engine, ignore_eos=True):
                assert (len(generation.response_ids), generation.finish_reason) == (self.max_new_tokens, "length")

    def test_a_stop_token_ends_a_response_and_is_its_last_token(self) -> None:
        with self.open_engine() as (engine, _):
            whole = self.generate(engine, ignore_eos=True)
            for request, one in zip(self.requests, whole, strict=True):
                token = one.response_ids[len(one.response_ids) // 2]
                (cut,) = self.generate(engine, [request], ignore_eos=True, stop_token_ids=[token])
                assert cut.response_ids == one.response_ids[: one.response_ids.index(token) + 1]
                assert cut.finish_reason == "stop"

    def test_the_token_that_completes_a_stop_string_is_the_last_one(self) -> None:
        decode = type(self).decode
        if decode is None:
            pytest.skip("The engine of this suite has no tokenizer.")
        with self.open_engine() as (engine, _):
            whole = self.generate(engine, ignore_eos=True)
            for request, one in zip(self.requests, whole, strict=True):
                text = decode(one.response_ids[1:4])
                stops = ["no such text", text] if text else ["no such text"]
                (cut,) = self.generate(engine, [request], ignore_eos=True, stop=stops)
                ends = [n for n in range(1, len(one.response_ids) + 1) if text and text in decode(one.response_ids[:n])]
                assert cut.response_ids == one.response_ids[: ends[0] if ends else None]
                assert cut.finish_reason == ("stop" if ends else "length")

    def test_a_request_that_cannot_be_served_is_named(self) -> None:
        with self.open_engine() as (engine, _):
            empty = GenerationRequest(uid="empty-prompt", session=0, prompt_ids=())
            long = GenerationRequest(uid="long-prompt", session=0, prompt_ids=(2,) * 10_000_000)
            for request in (empty, long):
                with pytest.raises(RolloutError, match=request.uid):
                    self.generate(engine, [self.requests[0], request])

    def test_new_weights_change_what_is_generated_and_refused_ones_do_not(self) -> None:
        with self.open_engine() as (engine, weights):
            before = self.generate(engine, temperature=0)
            first = weights[0]
            with pytest.raises(WeightSyncError):
                engine.load_weights([*weights[1:], replace(first, shape=(*first.shape, 1))], 4)
            self.same(self.generate(engine, temperature=0), before)
            engine.load_weights(weights, 5)
            after = self.generate(engine, temperature=0)
            assert {g.weight_version for g in after} == {5}
            assert [g.log_probs for g in after] != [g.log_probs for g in before]
