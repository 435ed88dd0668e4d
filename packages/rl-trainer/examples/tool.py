"""A tool of your own: the policy calls it, reads the answer and continues."""

import asyncio

import msgspec

from rl_protocol.ports import Generation, SamplingParams
from rl_trainer import PromptRow, Tokenizer
from rl_trainer.rollout.agents import Limits, ToolAgent, ToolKind
from rl_trainer.rollout.session_turns import SessionRef, run_sessions


class Arguments(msgspec.Struct, forbid_unknown_fields=True):  # checked before each call
    text: str


class WordCount:
    name, description, arguments = "word_count", "The number of words of a text.", Arguments

    def call(self, arguments):  # in a thread of its own; what it raises, the policy reads
        return str(len(arguments.text.split()))


TOOL = ToolKind(WordCount)  # what a package registers
SESSION = ToolAgent([TOOL], "hermes", Limits(turns=4, turn_tokens=256)).session


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
    row = PromptRow(prompt_ids=tuple(map(ord, "How many words? ")), data_source="words", ground_truth="2")
    call = '<tool_call>{"name": "word_count", "arguments": {"text": "two words"}}</tool_call>'
    ref, sampling = SessionRef("prompt-0", 0, row), SamplingParams(max_new_tokens=400)
    ((trajectory,),) = await run_sessions(SESSION, [ref], Scripted(call, "2 words."), sampling, letters)
    trained = sum(trajectory.response_mask)
    print(letters.decode(trajectory.response_ids))
    print(f"{trained} of {len(trajectory.response_ids)} tokens are trained on: those of the policy")


if __name__ == "__main__":
    asyncio.run(main())
