"""The calculator demo learns: the score rises as the policy learns to call the tool."""

from __future__ import annotations

import json
import sys

import pytest

from rl_app_ppo.demo.calculator_chats import LLAMA3, QWEN

ACCURACY = "val-core/three_digit_multiplication/acc/mean@1"


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("demo", "chat"),
    [
        pytest.param("calculator", QWEN, marks=pytest.mark.slow),
        pytest.param("calculator_llama3", LLAMA3, marks=pytest.mark.nightly),
    ],
)
def test_the_score_rises_because_of_the_tool(app, calculator_models, demo, chat):
    """The policy calls the tool in the dialect of its chat template."""
    common = (
        "algorithm=grpo_calculator",
        f"data.demo={demo}",
        f"model.path={calculator_models(demo)}",
        "data.val_size=64",
        "data.train_batch_size=32",
        "trainer.test_freq=0",
    )
    done = app(*common, "trainer.total_training_steps=5", timeout=500)
    assert done.code == 0, done.err
    before, *steps = done.metrics
    after = steps[-1]
    assert before[ACCURACY] <= 0.2
    assert after[ACCURACY] >= 0.6
    assert before["val-aux/num_turns/mean"] <= 1.2  # the policy guesses immediately
    assert after["val-aux/num_turns/mean"] >= 1.8
    assert steps[0]["agent/tool_calls/mean"] < 0.5 < after["agent/tool_calls/mean"]
    # only tokens of the policy count, in every turn
    assert max(m["training/rollout_log_probs_diff_max"] for m in steps) < 1e-4
    samples = [json.loads(line) for line in (done.folder / "samples" / "5.jsonl").read_text().splitlines()]
    for sample in samples:
        if sample["outcome"]["numbers"]["acc"]:
            assert sample["response"].startswith(chat.call[0])
            assert sample["response"].endswith(f"\n{sample['ground_truth']}")
            assert '"description": "Evaluates an arithmetic expression' in sample["prompt"]


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_without_the_tool_nothing_is_right(app, calculator_model):
    common = (
        "algorithm=grpo_calculator",
        f"model.path={calculator_model}",
        "data.val_size=64",
        "data.train_batch_size=32",
        "trainer.test_freq=0",
    )
    alone = app(
        *common, "rollout.session=single_turn", "trainer.run_name=alone", "trainer.total_training_steps=1", timeout=300
    )
    assert alone.code == 0, alone.err
    lines = [json.loads(line) for line in (alone.folder.parent / "alone" / "metrics.jsonl").read_text().splitlines()]
    assert [m[ACCURACY] for m in lines if ACCURACY in m] == [0.0, 0.0]
    assert max(m["critic/score/max"] for m in lines[1:]) == 0.0
    assert not any("num_turns/mean" in m for m in lines)


SERVER = """
import anyio
import mcp.types as types
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server

from rl_trainer.rollout.agents import Calculator, described

FUNCTION = described(Calculator())["function"]
TOOL = types.Tool(name=FUNCTION["name"], description=FUNCTION["description"], inputSchema=FUNCTION["parameters"])


async def listed(context, params):
    return types.ListToolsResult(tools=[TOOL])


async def called(context, params):
    expression = Calculator.arguments(**params.arguments)
    try:
        text, failed = Calculator().call(expression), False
    except (ValueError, ArithmeticError) as error:
        text, failed = str(error), True
    return types.CallToolResult(content=[types.TextContent(type="text", text=text)], isError=failed)


async def main():
    server = Server("calculator", on_list_tools=listed, on_call_tool=called)
    async with stdio_server() as streams:
        await server.run(*streams, server.create_initialization_options())


anyio.run(main)
"""


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_the_score_rises_with_a_calculator_that_an_mcp_server_has(app, calculator_model, tmp_path):
    """The demo's tool, described and called in another process; a stop string ends each call."""
    (tmp_path / "server.py").write_text(SERVER)
    entry = {"command": sys.executable, "args": [str(tmp_path / "server.py")]}
    (tmp_path / "servers.json").write_text(json.dumps({"mcpServers": {"calculator": entry}}))
    common = (
        "algorithm=grpo_calculator",
        f"model.path={calculator_model}",
        "data.val_size=64",
        "data.train_batch_size=32",
        "trainer.test_freq=0",
        "rollout.agent.tools=[]",
        "rollout.agent.mcp.servers=servers.json",
    )
    refused = app(*common)
    assert refused.code == 2
    assert "rollout.agent.mcp.servers='servers.json'" in refused.err
    assert "add --trust servers.json" in refused.err
    stop = "rollout.stop=['</tool_call>']"  # a part of the token that completes it
    done = app(*common, stop, "trainer.total_training_steps=5", "--trust", "servers.json", timeout=500)
    assert done.code == 0, done.err
    before, *steps = done.metrics
    assert before[ACCURACY] <= 0.2
    assert steps[-1][ACCURACY] >= 0.6
    assert steps[-1]["agent/tool_calls/mean"] > 0.5
    assert steps[-1]["agent/tool_errors/mean"] < 0.5
    assert max(m["training/rollout_log_probs_diff_max"] for m in steps) < 1e-4
    samples = [json.loads(line) for line in (done.folder / "samples" / "5.jsonl").read_text().splitlines()]
    assert any("</tool_call>\n<|im_start|>user\n<tool_response>\n" in sample["response"] for sample in samples)


CHECKED = """
import msgspec
from rl_trainer.rollout.agents import Calculator, InteractionKind, ToolKind


class Scaled(Calculator):
    name = "calculator"

    def __init__(self, factor=1):
        self.factor = factor

    def call(self, arguments, offset=0):
        return str(int(super().call(arguments)) * self.factor + offset)


class Once:
    def __init__(self, question):
        self.question = question

    def reply(self, text):
        question, self.question = self.question, None
        return question


TOOL, USER = ToolKind(Scaled), InteractionKind(Once)
"""


@pytest.mark.slow
def test_rows_in_verls_format_choose_agent_arguments_and_interaction(app, calculator_model, tmp_path):
    """`tools_kwargs`, `interaction_kwargs` and `agent_name` reach the sessions of a run."""
    (tmp_path / "own.py").write_text(CHECKED)
    kwargs = {"calculator": {"create_kwargs": {"factor": 10}, "execute_kwargs": {"offset": 3}}}
    rows = [
        {
            "data_source": "d",
            "prompt": [{"role": "user", "content": f"{factor}*512="}],
            "reward_model": {"ground_truth": str(factor * 512)},
            "agent_name": ("tool_agent", "single_turn_agent")[i % 2],
            "extra_info": {
                "need_tools_kwargs": i % 2 == 0,
                "tools_kwargs": kwargs if i % 2 == 0 else None,
                "interaction_kwargs": {"name": "own.py:USER", "question": "512*512="},
            },
        }
        for i, factor in enumerate(range(400, 416))
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    command = (
        f"model.path={calculator_model}",
        "data.train_files=rows.jsonl",
        "data.val_size=512",  # of the demo, which is not used
        "data.val_files=rows.jsonl",
        "rollout.val_kwargs.n=8",
        "rollout.val_kwargs.temperature=1.0",
        "reward.function=calculator",
        "rollout.session=tool_agent",
        "rollout.agent.tools=[own.py:TOOL]",
        "rollout.response_length=48",
        "data.train_batch_size=16",
        "trainer.total_training_steps=1",
    )
    refused = app(*command, "--trust", "own.py")
    assert refused.code == 2
    assert (
        "Row 1 of the train data: extra_info.interaction_kwargs.name must be in rollout.agent.interactions"
        in refused.err
    )
    done = app(*command, "rollout.agent.interactions=[own.py:USER]", "--trust", "own.py")
    assert done.code == 0, done.err
    samples = [json.loads(line) for line in (done.folder / "samples" / "1.jsonl").read_text().splitlines()]
    scaled = questions = 0
    for sample in samples:
        factor = int(sample["prompt"].partition("*512=")[0].rpartition("\n")[2])
        with_tools = factor % 2 == 0
        assert ("Tools:" in sample["prompt"]) == with_tools
        response = sample["response"]
        called = QWEN.written(f"{factor}*512")
        scaled += with_tools and response.startswith(
            f"{called}\n<|im_start|>user\n<tool_response>\n{factor * 5120 + 3}\n"
        )
        questions += "\n<|im_start|>user\n512*512=\n<|im_start|>assistant\n" in response
        assert with_tools or "<|im_start|>user" not in response
    assert scaled
    assert questions
