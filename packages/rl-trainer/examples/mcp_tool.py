"""A tool of an MCP server: `mcp_tool.py serve` is the server, without it a policy calls it."""

import asyncio
import sys

from rl_protocol.ports import Generation, SamplingParams
from rl_trainer import PromptRow, Tokenizer
from rl_trainer.config import AgentConfig
from rl_trainer.rollout.agents import ToolAgent
from rl_trainer.rollout.agents.mcp import ServerEntry, server_tools
from rl_trainer.rollout.session_turns import SessionRef, run_sessions


def serve():
    from mcp.server.mcpserver import MCPServer

    server = MCPServer("words", log_level="WARNING")

    @server.tool()
    def word_count(text: str) -> str:
        """The number of words of a text."""
        return str(len(text.split()))

    server.run("stdio")


class Scripted:
    """Stands in for the policy: one text per turn, a token per character, ended by the token 0."""

    weight_version = 0

    def __init__(self, *turns):
        self.turns = list(turns)

    async def generate(self, requests, params):
        ids = (*map(ord, self.turns.pop(0)), 0)
        return [Generation(response_ids=ids, log_probs=(0.0,) * len(ids), finish_reason="stop", weight_version=0)]


async def main():
    config = AgentConfig(call_timeout_s=60.0)
    tools = server_tools([ServerEntry("words", command=(sys.executable, __file__, "serve"))], config)
    session = ToolAgent(tools, "hermes", config).session
    print(f"described to the model: {session.tools[0]['function']['description']}")
    letters = Tokenizer(
        encode=lambda text: list(map(ord, text)), decode=lambda ids: bytes(ids).decode().replace("\0", "")
    )
    row = PromptRow(prompt_ids=tuple(map(ord, "How many words? ")), data_source="words", ground_truth="2")
    call = '<tool_call>{"name": "word_count", "arguments": {"text": "two words"}}</tool_call>'
    ref, sampling = SessionRef("prompt-0", 0, row), SamplingParams(max_new_tokens=400)
    ((trajectory,),) = await run_sessions(session, [ref], Scripted(call, "2 words."), sampling, letters)
    print(letters.decode(trajectory.response_ids))


if __name__ == "__main__":
    serve() if sys.argv[1:] == ["serve"] else asyncio.run(main())
