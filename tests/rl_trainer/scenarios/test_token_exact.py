"""Nothing is tokenized twice: log-probs of several turns equal the trainer's, token by token."""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np
import pytest
from relative import apart

from rl_protocol import BatchData, ragged
from rl_protocol.ports import SamplingParams
from rl_trainer import PromptRow, SessionKind, Tokenizer
from rl_trainer.backends.torch_policy import TorchPolicyBackend
from rl_trainer.rollout.agents import Call, Limits, ToolAgent, ToolKind
from rl_trainer.rollout.hf_engine import HFRolloutEngine
from rl_trainer.rollout.session_turns import SessionRef, run_sessions

TELL = "ba" * 4
LOSSY = Tokenizer(
    encode=lambda text: [2 + ord(letter) - ord("a") for letter in text],
    decode=lambda ids: "".join("ab"[token % 2] for token in ids),
)
"""A tokenizer that gives many ids the same text, so that text does not determine the ids."""


class Always:
    """A tool with an answer of eight tokens, and a dialect in which every turn calls it."""

    name, description, arguments = "tell", "", msgspec.defstruct("Nothing", [])

    def call(self, arguments):
        return TELL

    def calls(self, text):
        return [Call("tell")]

    def observation(self, answers):
        return "".join(answer.text for answer in answers)


@pytest.fixture(scope="module")
def played(model_path):
    """64 prompts and their trajectories of up to four turns."""
    prompts = [tuple(2 + (i * k) % 12 for k in range(1, 2 + i % 4)) for i in range(64)]
    refs = [
        SessionRef(f"p{i}", 0, PromptRow(prompt_ids=ids, data_source="d", ground_truth=""))
        for i, ids in enumerate(prompts)
    ]
    kind = SessionKind(ToolAgent([ToolKind(Always)], Always(), Limits(turns=4, turn_tokens=12)).run)
    sampling = SamplingParams(max_new_tokens=56, temperature=1.0)
    sessions = asyncio.run(run_sessions(kind, refs, HFRolloutEngine(model_path), sampling, LOSSY))
    return prompts, [one for (one,) in sessions]


def recomputed(model_path, prompts, responses):
    data = BatchData({"prompts": ragged(prompts, "int64"), "responses": ragged(responses, "int64")})
    return TorchPolicyBackend(model_path, None).compute_log_probs(data, temperature=1.0).ragged("log_probs").rows()


def test_log_probs_of_several_turns_are_those_the_trainer_computes(played, model_path):
    prompts, rows = played
    turns = [one.stats.turns for one in rows]
    assert sum(n >= 2 for n in turns) >= 16, "there is something to prove"
    assert max(turns) >= 3
    sampled, computed = list[float](), list[float]()
    for one, expected in zip(rows, recomputed(model_path, prompts, [t.response_ids for t in rows]), strict=True):
        made, said = np.array(one.response_mask), np.array(one.log_probs)
        sampled += said[made].tolist()
        computed += expected[made].tolist()
        assert not said[~made].any()
        told, rest = divmod(int((~made).sum()), len(TELL))
        unfit = one.stats.tool_calls - told  # the last answer, where no room was left for it
        assert (rest, unfit) in {(0, 0), (0, int(one.stats.finish == "response_length"))}
    assert apart(sampled, computed) < 1e-5


def test_tokens_that_had_become_text_and_ids_again_would_show(played, model_path):
    """The control: sampled tokens, decoded and encoded again, have very different log-probs."""
    prompts, rows = played
    several = [i for i, one in enumerate(rows) if one.stats.turns >= 2]
    again = []
    for i in several:
        response, made = rows[i].response_ids, rows[i].response_mask
        first = made.index(False)  # end of the first turn
        again.append([*LOSSY.encode(LOSSY.decode(response[:first])), *response[first:]])
    assert all(len(a) == len(rows[i].response_ids) for a, i in zip(again, several, strict=True))
    expected = recomputed(model_path, [prompts[i] for i in several], again)
    later = []
    for i, values in zip(several, expected, strict=True):
        mine = np.array(rows[i].response_mask)
        mine[: mine.argmin()] = False  # keep only the later turns, whose ids are unchanged
        later.append(float(np.abs(np.array(rows[i].log_probs) - values)[mine].max()))
    assert np.median(later) > 1e-2
