"""The rollout worker: it answers other calls while it reads images, and what it writes."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from replay_buffers import leased

from rl_protocol import BatchError, ConfigError, RolloutError, unpack_arrays
from rl_protocol.ports import Generation, ImageInput, Lease, SamplingParams
from rl_protocol.rl_columns import KEPT_COLUMNS, ROUTED, ROUTED_COLUMNS
from rl_protocol.testing.bigram_model import BigramEngine
from rl_protocol.testing.memory_data_plane import MemoryDataPlane
from rl_protocol.torch import to_weight
from rl_trainer import PromptRow, RolloutWorker, SessionKind, Tokenizer, Trajectory
from rl_trainer.backends.torch_policy import TorchPolicyBackend
from rl_trainer.rollout.demonstrations import Demonstrations
from rl_trainer.rollout.hf_engine import HFRolloutEngine
from rl_trainer.workers.messages import LeasedPrompt, Partition, RolloutCall

ROWS = [
    PromptRow(prompt_ids=(2, 3), data_source="d", ground_truth="", images=("a.png",)),
    PromptRow(prompt_ids=(4,), data_source="d", ground_truth="", images=("b.png",)),
]
CALL = RolloutCall(
    partition=Partition(name="train", split="train", step=0, n=1, sampling=SamplingParams(max_new_tokens=3)),
    prompts=leased({"p0": 0, "p1": 1}),
)


class SlowReader:
    """A reader that returns once the event loop has run, and fails if the loop is blocked."""

    def __init__(self, loop):
        self._loop = loop
        self.read = []

    def __call__(self, paths, prompt_ids):
        loop_ran = threading.Event()
        self._loop.call_soon_threadsafe(loop_ran.set)
        if not loop_ran.wait(60):
            raise RolloutError("the event loop did not run while an image was read")
        self.read.append(tuple(paths))
        return (ImageInput(np.full((4, 96), len(self.read), np.float32), (1, 2, 2)),)


def rollout(make_reader):
    async def body():
        plane, reader = MemoryDataPlane(), make_reader(asyncio.get_running_loop())
        worker = RolloutWorker(plane, BigramEngine(), {"train": ROWS}, images=reader)
        await worker.rollout(CALL)
        rows = await plane.list_rows("train/prompts")
        return reader, await plane.get(rows, ["image_patches"])

    return asyncio.run(body())


def test_the_event_loop_runs_while_an_image_is_read():
    reader, data = rollout(SlowReader)
    assert reader.read == [("a.png",), ("b.png",)]
    # each prompt has its own image
    assert [row.reshape(-1)[0] for row in data.ragged("image_patches").rows()] == [1, 2]


def test_an_image_that_can_not_be_read_is_the_error_of_the_call():
    def failing(loop):
        def read(paths, prompt_ids):
            raise RolloutError(f"The image {paths[0]} can't be read.")

        return read

    with pytest.raises(RolloutError, match=r"The image a\.png can't be read"):
        rollout(failing)


class Interrupted:
    """A plane that runs `before` ahead of its first put of trajectories."""

    def __init__(self, plane, before):
        self._plane, self._before = plane, before

    def __getattr__(self, name):
        return getattr(self._plane, name)

    async def put(self, partition, *args, **kwargs):
        if partition == "train":
            self._before()
        await asyncio.sleep(0)
        return await self._plane.put(partition, *args, **kwargs)


@pytest.mark.parametrize("when", ["while it generates", "while it writes"])
def test_a_cancelled_call_generates_no_further_and_writes_all_or_nothing(when):
    rows = [PromptRow(prompt_ids=(2, 3), data_source="d", ground_truth="")] * 2
    asked = []

    class Waiting(BigramEngine):
        async def generate(self, requests, params):
            asked.append(len(requests))
            if when == "while it generates":
                await asyncio.Event().wait()
            return await super().generate(requests, params)

    async def body():
        memory = MemoryDataPlane()
        plane = Interrupted(memory, lambda: running.cancel())
        worker = RolloutWorker(plane, Waiting(), {"train": rows})
        running = asyncio.create_task(worker.rollout(CALL))
        while not asked:
            await asyncio.wait([running], timeout=0)
        if when == "while it generates":
            running.cancel()
        await asyncio.wait([running])
        settling = list(worker._settling)
        await asyncio.gather(*settling)
        return running.cancelled(), len(settling), len(await memory.list_rows("train"))

    expected = (True, 0, 0) if when == "while it generates" else (True, 1, 2)
    assert asyncio.run(body()) == expected


class Updated:
    """An engine whose weights change after some tokens of the first call, per session."""

    weight_version = 4

    def __init__(self, *tokens):
        self._tokens = tokens

    async def generate(self, requests, params):
        version, self.weight_version = self.weight_version, 5
        return [
            Generation(
                response_ids=(2,) * made,
                log_probs=(-0.5,) * made,
                finish_reason="abort" if version == 4 and made < params.max_new_tokens else "length",
                weight_version=version,
            )
            for request in requests
            for made in (self._tokens[request.session] if version == 4 else params.max_new_tokens,)
        ]


def test_every_token_has_its_version():
    """Session 0 is generated by version 4, session 1 by both, session 2 by the later one alone."""
    call = RolloutCall(
        partition=Partition(name="train", split="train", step=0, n=3, sampling=SamplingParams(max_new_tokens=3)),
        prompts=leased({"p": 0}, n=3),
    )

    async def body():
        plane = MemoryDataPlane()
        row = PromptRow(prompt_ids=(2, 3), data_source="d", ground_truth="")
        await RolloutWorker(plane, Updated(3, 1, 0), {"train": [row]}).rollout(call)
        rows = await plane.list_rows("train")
        return rows, await plane.get(rows, ["rollout_versions"])

    rows, data = asyncio.run(body())
    runs = {
        key.split("/")[1]: versions.tolist()
        for key, versions in zip(rows.keys, data.ragged("rollout_versions").rows(), strict=True)
    }
    assert runs == {"0": [[4, 3]], "1": [[4, 1], [5, 2]], "2": [[5, 3]]}
    assert data["rollout_versions"].dtype == "int32"
    assert [tag["version"] for tag in rows.tags] == [4, 4, 5]
    assert [tag.get("newest_version") for tag in rows.tags] == [None, 5, None]


@pytest.mark.parametrize("replay", [False, True])
def test_the_kept_sets_of_sampled_tokens_are_columns(model_path, replay):
    """Of the data's answer, which nothing sampled, all tokens are kept."""
    sampling = SamplingParams(max_new_tokens=3, top_k=2, kept_sets=replay)
    call = RolloutCall(
        partition=Partition(name="train", split="train", step=0, n=2, sampling=sampling),
        prompts=leased({"p": 0}, n=2),
    )

    async def body():
        plane, row = MemoryDataPlane(), PromptRow(prompt_ids=(2, 3), data_source="d", ground_truth="ef")
        answers = Demonstrations(tokenizer=SPELLED.tokenizer, eos_id=1)
        engine = HFRolloutEngine(model_path)
        worker = RolloutWorker(plane, engine, {"train": [row]}, demonstrations=answers, kept_sets=replay)
        await worker.rollout(call)
        rows = await plane.list_rows("train")
        return rows.fields, await plane.get(rows, [name for name in KEPT_COLUMNS if replay])

    fields, data = asyncio.run(body())
    assert set(KEPT_COLUMNS) <= set(fields) if replay else not set(KEPT_COLUMNS) & set(fields)
    if replay:
        sampled, answer = data.ragged("kept_counts").rows()
        # of 14 tokens two are kept: their ids, or a bitmap of one word and the one before it
        assert set(sampled.tolist()) == {2}
        assert answer.tolist() == [0, 0, 0]
        assert data.ragged("kept_words").lengths.tolist() == [2 * len(sampled), 0]


def test_the_experts_of_each_token_are_columns(moe_model):
    """Of the data's answer, which the rollout did not compute, there are none."""

    def put(experts):
        sampling = SamplingParams(max_new_tokens=5, routed_experts=True)
        call = RolloutCall(
            partition=Partition(name="train", split="train", step=0, n=2, sampling=sampling),
            prompts=leased({"p": 0}, n=2),
        )

        async def body():
            plane, row = MemoryDataPlane(), PromptRow(prompt_ids=(4, 3, 5), data_source="d", ground_truth="ef")
            answers = Demonstrations(tokenizer=SPELLED.tokenizer, eos_id=1)
            engine = HFRolloutEngine(moe_model)
            worker = RolloutWorker(plane, engine, {"train": [row]}, demonstrations=answers, experts=experts)
            await worker.rollout(call)
            return await plane.get(await plane.list_rows("train"), ["responses", *ROUTED_COLUMNS])

        return asyncio.run(body())

    data = put(4)
    (sampled,), (answer,) = unpack_arrays(data, ROUTED)
    made, given = data.ragged("responses").lengths
    assert sampled.shape == (3 + made - 1, 2, 2)
    assert answer.shape == (3 + given - 1, 0, 0)
    assert set(sampled.ravel().tolist()) <= {0, 1, 2, 3}
    with pytest.raises(BatchError, match=r"Session 0 of prompt 'p' has a routed expert 3, .* the experts 0 to 2"):
        put(3)


SPELLED = Demonstrations(
    tokenizer=Tokenizer(encode=lambda text: [ord(c) - ord("a") for c in text], decode=str), eos_id=1, key="solution"
)


def test_the_last_response_to_a_training_prompt_is_the_answer_of_the_data():
    """It is not generated; in validation all responses are."""
    rows = [
        PromptRow(prompt_ids=(2, 3), data_source="d", ground_truth="", extra_info={"solution": text}) for text in "ce"
    ]
    asked = []

    class Counting(BigramEngine):
        async def generate(self, requests, params):
            asked.extend((request.uid, request.session) for request in requests)
            return await super().generate(requests, params)

    async def body(name):
        plane = MemoryDataPlane()
        worker = RolloutWorker(plane, Counting(), {"train": rows}, demonstrations=SPELLED)
        partition = Partition(name=name, split="train", step=0, n=2, sampling=SamplingParams(max_new_tokens=3))
        await worker.rollout(RolloutCall(partition=partition, prompts=leased({"p": 0, "q": 1}, n=2)))
        listed = await plane.list_rows(name)
        data = await plane.get(listed, ["responses", "demonstration", "response_mask", "rollout_log_probs"])
        return listed, {key: data.select_rows([i]) for i, key in enumerate(listed.keys)}

    listed, by_key = asyncio.run(body("train"))
    assert set(asked) == {("p", 0), ("q", 0)}
    assert by_key["p/1/0"].ragged("responses").row(0).tolist() == [2, 1]  # c, and the end
    assert by_key["q/1/0"].ragged("responses").row(0).tolist() == [4, 1]
    assert {key: set(row.ragged("demonstration").values.tolist()) for key, row in by_key.items()} == {
        "p/0/0": {False},
        "p/1/0": {True},
        "q/0/0": {False},
        "q/1/0": {True},
    }
    assert by_key["p/1/0"].ragged("response_mask").values.all()
    assert not by_key["p/1/0"].ragged("rollout_log_probs").values.any()
    assert {tag["response_len"] for key, tag in zip(listed.keys, listed.tags, strict=True) if "/1/" in key} == {2}
    asked.clear()
    _, validated = asyncio.run(body("validation"))
    assert len(asked) == 4
    assert not any(row.ragged("demonstration").values.any() for row in validated.values())


def test_a_prompt_that_is_tried_again_has_one_answer_too():
    """The sessions of another attempt have other numbers."""
    row = PromptRow(prompt_ids=(2, 3), data_source="d", ground_truth="", extra_info={"solution": "c"})
    lease = Lease("train", "p", attempt=1, sessions=(3, 4, 5), version=0, seconds=600.0)
    partition = Partition(name="train", split="train", step=0, n=3, sampling=SamplingParams(max_new_tokens=3))

    async def body():
        plane = MemoryDataPlane()
        worker = RolloutWorker(plane, BigramEngine(), {"train": [row]}, demonstrations=SPELLED)
        await worker.rollout(RolloutCall(partition=partition, prompts=(LeasedPrompt(lease, 0),)))
        listed = await plane.list_rows("train")
        data = await plane.get(listed, ["demonstration"])
        return dict(zip(listed.keys, data.ragged("demonstration").rows(), strict=True))

    found = {key: set(given.tolist()) for key, given in asyncio.run(body()).items()}
    assert found == {"p/3/0": {False}, "p/4/0": {False}, "p/5/0": {True}}


def test_an_answer_that_is_missing_or_too_long_is_named():
    row = PromptRow(prompt_ids=(2,), data_source="sums", ground_truth="7", extra_info={"index": 3, "solution": "abc"})
    assert SPELLED.trajectory(row, version=5, longest=4).response_ids == (0, 1, 2, 1)
    with pytest.raises(ConfigError, match=r"response_length=3 must hold every answer .* of 'sums' has .* 4 tokens"):
        SPELLED.trajectory(row, version=5, longest=3)
    lost = dataclasses.replace(SPELLED, key="answer")
    with pytest.raises(ConfigError, match=r"key='answer' .* got None .* that has ground_truth, index, solution"):
        lost.answer(row)


def test_the_runs_of_an_empty_response_are_empty():
    silent = Trajectory(response_ids=(), response_mask=(), log_probs=(), weight_version=3)
    assert silent.runs == ()

    async def silence(row, generate):
        return [silent]

    async def body():
        plane, row = MemoryDataPlane(), PromptRow(prompt_ids=(2, 3), data_source="d", ground_truth="")
        worker = RolloutWorker(plane, BigramEngine(), {"train": [row]}, SessionKind(silence))
        partition = Partition(name="train", split="train", step=0, n=1, sampling=SamplingParams(max_new_tokens=3))
        await worker.rollout(RolloutCall(partition=partition, prompts=leased({"p": 0})))
        return await plane.get(await plane.list_rows("train"), ["rollout_versions"])

    assert asyncio.run(body()).ragged("rollout_versions").row(0).shape == (0, 2)


def test_transformers_weights_that_change_meanwhile_are_the_second_run(model_path):
    """What the first version generated until then is kept, and its log-probs are its own."""
    engine = HFRolloutEngine(model_path, interruptible=True)
    heavier = [
        to_weight(weight.name, torch.from_numpy(weight.data.view(np.float32).reshape(weight.shape) * 1.1))
        for weight in TorchPolicyBackend(model_path, None).named_weights()
    ]
    params = SamplingParams(max_new_tokens=24, ignore_eos=True)
    call = RolloutCall(
        partition=Partition(name="train", split="train", step=0, n=3, sampling=params), prompts=leased({"p": 0}, n=3)
    )

    async def body():
        plane, row = MemoryDataPlane(), PromptRow(prompt_ids=(2, 3), data_source="d", ground_truth="")
        running = asyncio.create_task(RolloutWorker(plane, engine, {"train": [row]}).rollout(call))
        for _ in range(8):
            await asyncio.sleep(0)
        engine.load_weights(heavier, 1)
        await running
        return await plane.get(await plane.list_rows("train"), ["rollout_versions"])

    for runs in asyncio.run(body()).ragged("rollout_versions").rows():
        assert runs[:, 0].tolist() == [0, 1]
        assert runs[:, 1].sum() == 24


def test_as_many_responses_are_answers_as_their_source_says():
    """By source none, one or all."""
    sources, asked = {"none": 0, "one": 1, "all": 3}, []
    rows = [
        PromptRow(prompt_ids=(2, 3), data_source=source, ground_truth="", extra_info={"solution": "c"})
        for source in sources
    ]

    class Counting(BigramEngine):
        async def generate(self, requests, params):
            asked.extend((request.uid, request.session) for request in requests)
            return await super().generate(requests, params)

    async def body():
        plane = MemoryDataPlane()
        answers = replace(SPELLED, given=lambda source, n: min(n, sources[source]))
        worker = RolloutWorker(plane, Counting(), {"train": rows}, demonstrations=answers)
        partition = Partition(name="train", split="train", step=0, n=3, sampling=SamplingParams(max_new_tokens=3))
        await worker.rollout(RolloutCall(partition=partition, prompts=leased({"p": 0, "q": 1, "r": 2}, n=3)))
        listed = await plane.list_rows("train")
        return listed.keys, await plane.get(listed, ["demonstration"])

    keys, data = asyncio.run(body())
    given = {key for key, row in zip(keys, data.ragged("demonstration").rows(), strict=True) if row.all()}
    assert given == {"q/2/0", "r/0/0", "r/1/0", "r/2/0"}
    assert set(asked) == {("p", 0), ("p", 1), ("p", 2), ("q", 0), ("q", 1)}
