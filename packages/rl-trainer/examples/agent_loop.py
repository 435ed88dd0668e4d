"""An agent loop of your own: a wrong answer is asked again, and the session is one trajectory."""

import asyncio

from rl_protocol.ports import Generation, SamplingParams
from rl_trainer import PromptRow, RolloutStats, SessionKind, Tokenizer
from rl_trainer.rollout.agents import Transcript
from rl_trainer.rollout.session_turns import SessionRef, run_sessions

TRIES, TURN_TOKENS = 3, 8


async def ask_again(row, generate):
    """One session: the policy writes, the loop decides what it reads next."""
    transcript = Transcript(row.prompt_ids, generate)
    for turns in range(1, TRIES + 1):
        answer = await transcript.turn(TURN_TOKENS)
        right = generate.tokenizer.decode(answer.response_ids) == row.ground_truth
        if right or transcript.left <= len(row.prompt_ids):
            break
        if turns < TRIES:
            transcript.observe(row.prompt_ids)  # seen, not trained on
    return [transcript.trajectory(RolloutStats(turns=turns))]


SESSION = SessionKind(ask_again)


def score(data_source, solution_str, ground_truth, extra_info=None):
    """1 if the last answer is right; the text has all turns, and what was asked between them."""
    last = solution_str.rpartition("=")[2]
    return {"score": float(last == ground_truth), "first": float("=" not in solution_str), "pred": last}


class Scripted:
    """Stands in for the policy: one text per turn, a token per character, ended by the token 0."""

    weight_version = 0

    def __init__(self, *turns):
        self.turns = list(turns)

    async def generate(self, requests, params):
        ids = (*map(ord, self.turns.pop(0)), 0)
        return [Generation(response_ids=ids, log_probs=(0.0,) * len(ids), finish_reason="stop", weight_version=0)]


async def main():
    letters = Tokenizer(
        encode=lambda text: list(map(ord, text)), decode=lambda ids: bytes(ids).decode().replace("\0", "")
    )
    row = PromptRow(prompt_ids=tuple(map(ord, "37+45=")), data_source="sums", ground_truth="82")
    ref, sampling = SessionRef("prompt-0", 0, row), SamplingParams(max_new_tokens=40)
    ((trajectory,),) = await run_sessions(SESSION, [ref], Scripted("72", "82"), sampling, letters)
    text = letters.decode(trajectory.response_ids)
    print(text, score("sums", text, "82"))
    print(f"{sum(trajectory.response_mask)} of {len(trajectory.response_ids)} tokens are trained on")


if __name__ == "__main__":
    asyncio.run(main())
