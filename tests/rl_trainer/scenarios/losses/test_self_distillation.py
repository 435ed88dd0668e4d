"""Self-distillation: the reference policy sees more than the policy, and scores its responses."""

from __future__ import annotations

import asyncio

import pytest
import torch
from replay_buffers import leased
from transformers import AutoModelForCausalLM

from rl_protocol import ConfigError, KVBatchMeta
from rl_protocol.ports import SamplingParams
from rl_protocol.testing.memory_data_plane import MemoryDataPlane
from rl_trainer import ActorConfig, AlgorithmConfig, PromptRow, RolloutWorker, Tokenizer, step_columns
from rl_trainer.backends.torch_policy import PolicyOptions, TorchPolicyBackend
from rl_trainer.rollout.demonstrations import Demonstrations
from rl_trainer.rollout.hf_engine import HFRolloutEngine
from rl_trainer.rollout.teacher_context import TeacherContext
from rl_trainer.workers.actor import ActorWorker, ReferenceWorker
from rl_trainer.workers.messages import Partition, RolloutCall, StageCall

TOKENIZER = Tokenizer(encode=lambda text: [ord(c) - ord("a") for c in text], decode=str)
ROWS = [
    PromptRow(prompt_ids=(2, 3), data_source="d", ground_truth="ef"),
    PromptRow(prompt_ids=(4,), data_source="d", ground_truth="g", extra_info={"solution": "hij"}),
]
TOP = 4


def teacher(text, key="ground_truth"):
    return TeacherContext(text=text, answers=Demonstrations(tokenizer=TOKENIZER, eos_id=1, key=key))


def test_the_context_precedes_the_prompt_with_the_answer_in_it():
    assert teacher("k{answer}l").prompt(ROWS[0]) == (10, 4, 5, 11, 2, 3)
    assert teacher("kl").prompt(ROWS[1]) == (10, 11, 4)
    assert teacher("{answer}", "solution").prompt(ROWS[1]) == (7, 8, 9, 4)
    with pytest.raises(ConfigError, match=r"must name a text of each row: .*got None in a row of 'd'"):
        teacher("{answer}", "solution").prompt(ROWS[0])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("itself", [False, True], ids=["reference", "policy"])
def test_the_teacher_scores_the_responses_after_its_own_prompt(model_path, packed, itself):
    """Against transformers, which reads context, prompt and response of one row at a time."""
    algorithm = AlgorithmConfig(teacher_context="k{answer}l")
    actor = ActorConfig(use_kl_loss=True, kl_loss_topk=TOP, use_remove_padding=packed)
    columns, context = step_columns(algorithm, actor), teacher(algorithm.teacher_context)
    sampling = SamplingParams(max_new_tokens=4)
    partition = Partition(name="train", split="train", step=0, n=2, sampling=sampling)

    async def body():
        plane = MemoryDataPlane()
        rollout = RolloutWorker(plane, HFRolloutEngine(model_path), {"train": ROWS}, teacher=context)
        await rollout.rollout(RolloutCall(partition=partition, prompts=leased({"p0": 0, "p1": 1}, n=2)))
        rows = (await plane.list_rows("train")).without_tags()
        policy = TorchPolicyBackend(model_path, actor, options=PolicyOptions(frozen=not itself, top=TOP))
        actor_worker = ActorWorker(plane, columns, policy, 1.0, teacher_is_policy=True)
        worker = actor_worker if itself else ReferenceWorker(plane, columns, policy, 1.0)
        await worker.ref(rows, StageCall(batch=rows, step=0))
        prompts = await plane.get(KVBatchMeta(partition="train/prompts", keys=("p0", "p1")), ["prompts"])
        return rows.keys, prompts, await plane.get(rows, ["responses", "ref_log_prob", *columns.reference_top])

    keys, prompts, data = asyncio.run(body())
    assert [ids.tolist() for ids in prompts.ragged("prompts").rows()] == [list(row.prompt_ids) for row in ROWS]
    model = AutoModelForCausalLM.from_pretrained(model_path)
    names = ("responses", "ref_log_prob", "ref_top_log_probs")
    for key, *values in zip(keys, *(data.ragged(name).rows() for name in names), strict=True):
        response, log_prob, top = (value.tolist() for value in values)
        read = context.prompt(ROWS[int(key[1])])
        with torch.no_grad():
            logits = model(torch.tensor([[*read, *response]])).logits[0, len(read) - 1 : -1]
        truth = torch.log_softmax(logits.double(), -1)
        assert log_prob == pytest.approx(truth.gather(1, torch.tensor(response)[:, None])[:, 0].tolist(), rel=1e-4)
        assert top == pytest.approx(truth.topk(TOP).values.flatten().tolist(), rel=1e-4)
