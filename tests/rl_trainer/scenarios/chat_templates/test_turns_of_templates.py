"""Token exactness of conversations over the chat templates of model families.

Each family has a tokenizer made by program (`chat_families`). The policy writes every turn with
tokens that its tokenizer would not give for the same text, so that an encoding of earlier text
would show as other tokens.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import jinja2
import msgspec
import pytest
from chat_families import CHAT_FAMILIES, spelled, tokenizer_of, write_folder

from rl_protocol import KVBatchMeta
from rl_protocol.ports import Generation, SamplingParams
from rl_trainer import PromptRow, Tokenizer
from rl_trainer.data.prompt_rows import Message
from rl_trainer.rollout.agents import ToolAgent, ToolKind
from rl_trainer.rollout.agents.dialects.names import DIALECTS
from rl_trainer.rollout.agents.interactions import InteractionKind
from rl_trainer.rollout.serving import FolderChatTokenizer, agent_session
from rl_trainer.rollout.session_turns import SessionRef, run_sessions
from rl_trainer.rollout.trajectory_stats import rollout_metrics

DOCUMENT = Path(__file__).parents[4] / "packages" / "rl-trainer" / "docs" / "agents.md"
SAMPLING = SamplingParams(max_new_tokens=2000)
WITH_TOOLS = [name for name, family in CHAT_FAMILIES.items() if family.dialect]
QUESTION, REPLY = "What time is it?", "And now?"
MANNERS = {
    "text": lambda family: family.before + "Noon.",
    "space": lambda family: family.before + "Noon. \n",
    "thought": lambda family: family.thought + "Noon.",
}
"""What the policy writes in each turn."""


class Scripted:
    """An engine that writes these turns, and keeps the contexts in which it was asked.

    Args:
        turns: [turns] token ids of each.
    """

    def __init__(self, turns):
        self.turns, self.contexts, self.weight_version = list(turns), [], 1

    async def generate(self, requests, params):
        (request,) = requests
        ids = tuple(self.turns[len(self.contexts)])
        self.contexts.append(tuple(request.prompt_ids))
        return [Generation(response_ids=ids, log_probs=(-0.5,) * len(ids), finish_reason="stop", weight_version=1)]


class Now:
    name, description, arguments = "now", "The time.", msgspec.defstruct("Nothing", [])

    def call(self, arguments):
        return "noon"


class Curious:
    """Asks a second question."""

    def __init__(self):
        self.replies = [REPLY]

    def reply(self, text):
        return self.replies.pop() if self.replies else None


def rendered(family, *messages):
    template = jinja2.Environment(autoescape=False, trim_blocks=True, lstrip_blocks=True).from_string(family.template)
    return template.render(messages=messages, add_generation_prompt=True)


def play(kind, engine, prompt_ids, tokenizer=None, **facts):
    row = PromptRow(prompt_ids=tuple(prompt_ids), data_source="d", ground_truth="", **facts)
    (trajectories,) = asyncio.run(run_sessions(kind, [SessionRef("p", 0, row)], engine, SAMPLING, tokenizer))
    return trajectories


def forks_of(trajectories):
    """The metric, of one session with these trajectories."""
    keys = tuple(f"p/0/{index}" for index in range(len(trajectories)))
    rows = KVBatchMeta(partition="train", keys=keys, tags=tuple(one.stats.tags() for one in trajectories))
    return int(rollout_metrics(rows)["rollout/forks/max"])


def use_tools(name, manner):
    """A call, text, and text again: the engine and the trajectories."""
    family = CHAT_FAMILIES[name]
    tokenizer = tokenizer_of(family)
    text = MANNERS[manner](family)
    turns = [family.call + (family.call_end or family.end), text + family.end, text + family.end]
    engine = Scripted([spelled(tokenizer, family, turn) for turn in turns])
    agent = ToolAgent([ToolKind(Now)], family.dialect, interactions={"curious": InteractionKind(Curious)})
    words = Tokenizer(
        encode=lambda text: tokenizer.encode(text, add_special_tokens=False).ids,
        decode=lambda ids: tokenizer.decode(ids, skip_special_tokens=True),
    )
    prompt = words.encode(rendered(family, {"role": "user", "content": QUESTION}))
    kwargs = {"interaction_kwargs": {"name": "curious"}}
    return engine, play(agent.session, engine, prompt, words, extra_info=kwargs), tokenizer


def chat(family, manner, tokenizer, words, turns=4):
    """An agent that sends the whole conversation with each request; the engine and the
    trajectories, or None if a request was refused.
    """
    refused = []

    async def agent(row, base_url, key):
        messages = [{"role": "user", "content": QUESTION}]
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}) as client:
            for _ in range(turns):
                body = {"model": "policy", "messages": messages}
                async with client.post(f"{base_url}/chat/completions", json=body) as response:
                    answer = await response.json()
                if response.status != 200:
                    refused.append(answer["error"]["message"])
                    return
                messages = [*messages, answer["choices"][0]["message"], {"role": "user", "content": REPLY}]

    turn = spelled(tokenizer, family, MANNERS[manner](family) + family.end)
    assert turn != tokenizer.encode(MANNERS[manner](family) + family.end, add_special_tokens=False).ids
    kind = agent_session(agent, model="policy", context=4000, sampling=SAMPLING, tokenizer=words)
    prompt = words.encode(words.prompt([Message("user", QUESTION)]))
    engine = Scripted([turn] * turns)
    trajectories = play(kind, engine, prompt)
    assert all("must begin with the" in reason for reason in refused)
    return None if refused else (engine, trajectories)


@pytest.mark.parametrize("manner", MANNERS)
@pytest.mark.parametrize("name", WITH_TOOLS)
def test_each_context_of_a_tool_session_begins_with_all_before_it(name, manner):
    """No token is encoded twice, whatever the template does to earlier turns."""
    engine, (one,), _ = use_tools(name, manner)
    assert len(engine.contexts) == 3
    for before, turn, context in zip(engine.contexts, engine.turns, engine.contexts[1:], strict=False):
        assert context[: len(before) + len(turn)] == (*before, *turn)
    assert (*engine.contexts[0], *one.response_ids) == (*engine.contexts[2], *engine.turns[2])
    made = [token for token, mine in zip(one.response_ids, one.response_mask, strict=True) if mine]
    assert made == [token for turn in engine.turns for token in turn]
    assert (one.stats.turns, one.stats.tool_calls, one.stats.tool_errors) == (3, 1, 0)


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_a_dialect_knows_the_ends_of_turns(name):
    family = CHAT_FAMILIES[name]
    dialect = DIALECTS[family.dialect]
    assert (dialect.end, dialect.text_end) == (family.call_end or family.end, family.end)


@pytest.mark.parametrize("name", [name for name in WITH_TOOLS if name != "deepseek_r1"])
def test_between_two_turns_is_what_the_template_puts_there(name):
    """R1 is left out: its template drops the end of the empty thought from each earlier turn."""
    family = CHAT_FAMILIES[name]
    engine, _, tokenizer = use_tools(name, "text")
    said = {"role": "assistant", "content": "Noon."}
    conversation = rendered(
        family,
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": family.call},
        {"role": "tool", "content": "noon", "tool_call_id": family.call_id},
        said,
        {"role": "user", "content": REPLY},
    )
    seen = tokenizer.decode(engine.contexts[2], skip_special_tokens=False)
    assert seen.replace("<|return|>", "<|end|>") == conversation


def test_a_chat_is_one_trajectory_or_its_forks_are_counted(tmp_path):
    """The document's table: what each template does to four turns of an agent that sends text."""
    lines = [
        "| models | dialect | `tool_agent` | text | text and space | thought and text |",
        "|---|---|---|---|---|---|",
    ]
    for name, family in CHAT_FAMILIES.items():
        cells = []
        folder = tmp_path / name
        folder.mkdir()
        tokenizer, words = write_folder(family, folder), FolderChatTokenizer.load(folder)
        for manner in MANNERS:
            played = chat(family, manner, tokenizer, words)
            cells.append("refused" if played is None else str(forks_of(played[1])))
            if played is not None:
                engine, trajectories = played
                made = [sum(one.response_mask) for one in trajectories]
                assert sum(made) == sum(map(len, engine.turns))
                assert sum(one.stats.turns for one in trajectories) == 4
                assert (
                    engine.contexts[-1] + tuple(engine.turns[-1]) == engine.contexts[0] + trajectories[-1].response_ids
                )
        tools = {str(forks_of(use_tools(name, manner)[1])) for manner in MANNERS} if family.dialect else {"-"}
        shown = [family.models, f"`{family.dialect}`" if family.dialect else "none", *tools, *cells]
        lines.append(f"| {' | '.join(shown)} |")
    table = "\n".join(lines)
    assert table in DOCUMENT.read_text(encoding="utf-8"), f"docs/agents.md must have this table:\n{table}"
