"""Tools of real MCP servers over stdio and HTTP: calls, errors, servers that hang or die."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from rl_protocol import ConfigError
from rl_protocol.support.trusted_files import given_files, variables_for
from rl_trainer import PromptRow
from rl_trainer.config import AgentConfig, Limits, MCPConfig
from rl_trainer.rollout.agents import Answer, Call, described
from rl_trainer.rollout.agents.environment import Environment
from rl_trainer.rollout.agents.mcp import connection, forget_servers, read_servers
from rl_trainer.rollout.agents.mcp.connection import ListedTool
from rl_trainer.rollout.agents.mcp.tools import mcp_tools
from rl_trainer.rollout.agents.named import configured_agent

PROGRAM = Path(__file__).parents[2] / "programs" / "mcp_program.py"
GUIDE = Path(__file__).parents[4] / "docs" / "guides" / "mcp.md"
DEADLINE_S = 60.0
TOOK_LONGER = "the MCP server letters took longer than 1.8 s"


def write(folder, monkeypatch, trusted=True, **servers):
    """The path of a file of servers, which the environment allows."""
    path = folder / "servers.json"
    path.write_text(json.dumps({"mcpServers": servers}))
    if trusted:
        for name, value in variables_for(given_files([path], "trust")).items():
            monkeypatch.setenv(name, value)
    return str(path)


def stdio(test):
    """A server of its own for each test, since equal entries share a connection."""
    return {"command": sys.executable, "args": [str(PROGRAM), "stdio", str(test)]}


@pytest.fixture(scope="module")
def http(tmp_path_factory):
    """The URL of a server over HTTP."""
    file = tmp_path_factory.mktemp("http") / "port"
    with subprocess.Popen([sys.executable, str(PROGRAM), "http", str(file)]) as process:
        deadline = time.monotonic() + DEADLINE_S
        while not (file.exists() and file.read_text()):
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.05)
        yield f"http://127.0.0.1:{file.read_text()}/mcp"
        process.kill()


def environment(path, call_timeout_s=DEADLINE_S, **settings):
    mcp = MCPConfig(servers=path, start_timeout_s=DEADLINE_S, **settings)
    return Environment(mcp_tools(AgentConfig(mcp=mcp, call_timeout_s=call_timeout_s)), {})


async def _ask(environment, limits, *turns):
    row = PromptRow(prompt_ids=(1,), data_source="d", ground_truth="")
    async with environment.open(row, limits) as opened:
        return [await opened.answers(calls) for calls in turns]


def ask(environment, *turns, **limits):
    """The answers of each turn of one session."""
    return asyncio.run(_ask(environment, Limits(**{"call_timeout_s": DEADLINE_S, **limits}), *turns))


@pytest.mark.parametrize("transport", ["stdio", "http"])
def test_a_server_is_called_and_its_errors_are_answers(transport, tmp_path, monkeypatch, request):
    entry = (
        stdio(tmp_path) if transport == "stdio" else {"url": request.getfixturevalue("http"), "headers": {"X-A": "b"}}
    )
    one = environment(write(tmp_path, monkeypatch, letters=entry), answer_chars=300)
    tools = {tool["function"]["name"]: tool["function"] for tool in one.described}
    assert tools["add"]["description"] == "Add two numbers."
    assert tools["add"]["parameters"]["required"] == ["a"]
    ((sum_, text_sum, wrong, failed, much, picture),) = ask(
        one,
        [
            Call("add", {"a": 2, "b": 3}),
            Call("add", {"a": "4", "b": "5"}, as_text=True),
            Call("add", {"a": "many"}),
            Call("fail", {"why": "no reason"}),
            Call("much", {"letters": 301}),
            Call("picture"),
        ],
    )
    assert (sum_, text_sum) == (Answer("5"), Answer("9"))
    assert wrong.failed
    assert "valid integer" in wrong.text
    assert failed.failed
    assert "no reason" in failed.text
    assert much == Answer(
        "error: much: the answer has 301 characters, more than MCPConfig.answer_chars=300", failed=True
    )
    assert picture == Answer("error: picture: the answer has image content; only text can be read", failed=True)


@pytest.mark.slow
def test_sessions_share_a_server_which_is_replaced_when_it_dies_or_hangs(tmp_path, monkeypatch):
    path = write(tmp_path, monkeypatch, letters=stdio(tmp_path))
    one, hasty = environment(path), environment(path, call_timeout_s=2.0)  # over one connection
    ((first,), (second,)) = ask(one, [Call("count")], [Call("count")])
    assert first.text.split()[0] == "1"
    assert second.text == f"2 in {first.text.split()[-1]}"
    ((dead,), (third,)) = ask(one, [Call("die")], [Call("count")])
    assert dead == Answer("error: die: the MCP server letters has ended", failed=True)
    assert third.text.startswith("1 in ")
    pid = int(third.text.split()[-1])

    async def beside():
        waiting = asyncio.create_task(_ask(hasty, Limits(call_timeout_s=DEADLINE_S), [Call("wait", {"seconds": 30})]))
        while not waiting.done():
            await _ask(one, Limits(call_timeout_s=DEADLINE_S), [Call("add", {"a": 1})])
        return await waiting

    assert asyncio.run(beside()) == [[Answer(f"error: wait: {TOOK_LONGER}", failed=True)]]
    ((same,),) = ask(one, [Call("count")])
    assert same.text == f"2 in {pid}"  # a slow call is no reason to end a server that answers others
    assert ask(hasty, [Call("hang")]) == [[Answer(f"error: hang: {TOOK_LONGER}", failed=True)]]
    ((after,),) = ask(one, [Call("count")])
    assert after.text.startswith("1 in ")
    deadline = time.monotonic() + DEADLINE_S
    while psutil.pid_exists(pid):
        assert time.monotonic() < deadline, "the server that hangs still runs"
        time.sleep(0.05)


def test_a_server_that_is_gone_is_reported_by_each_call(tmp_path, monkeypatch):
    """It was there when the run started."""
    flag = tmp_path / "gone"
    script = f"import os, runpy, sys; os.path.exists({str(flag)!r}) and sys.exit('gone'); sys.argv = ['m', 'stdio']; "
    script += f"runpy.run_path({str(PROGRAM)!r}, run_name='__main__')"
    one = environment(write(tmp_path, monkeypatch, letters={"command": sys.executable, "args": ["-c", script]}))
    flag.touch()
    ((answer, again),) = ask(one, [Call("add", {"a": 1}), Call("add", {"a": 2})])
    assert answer.failed
    assert again.failed
    assert "the MCP server letters can't be used" in answer.text


def test_calls_beyond_the_limit_of_a_session_are_not_made(tmp_path, monkeypatch):
    one = environment(write(tmp_path, monkeypatch, letters=stdio(tmp_path)), tools=("count",))
    assert [tool["function"]["name"] for tool in one.described] == ["count"]
    turns = ask(one, [Call("count")], [Call("count"), Call("count")], calls=2)
    assert [[answer.failed for answer in turn] for turn in turns] == [[False], [False, True]]
    assert turns[1][1].text == "error: no call is left: a session may make 2"
    assert turns[1][0].text.startswith("2 in ")


@pytest.mark.slow
def test_a_server_ends_with_the_process_that_started_it(tmp_path, monkeypatch):
    """Also one that hangs, and does not see that its stdin is closed."""
    path = write(tmp_path, monkeypatch, letters=stdio(tmp_path))
    code = (
        "import asyncio, os, sys\n"
        "from rl_trainer.config import AgentConfig, MCPConfig\n"
        "from rl_trainer.rollout.agents.mcp import mcp_tools\n"
        f"tools = {{kind.make().name: kind.make() for kind in mcp_tools(AgentConfig(mcp=MCPConfig(servers={path!r}), call_timeout_s=600))}}\n"
        "print(tools['count'].call({}), flush=True)\n"
        "import threading; threading.Thread(target=tools['hang'].call, args=({},), daemon=True).start()\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=dict(os.environ)
    ) as process:
        server = int(process.stdout.readline().split()[-1])
        assert psutil.pid_exists(server)
        process.kill()
    deadline = time.monotonic() + DEADLINE_S
    while psutil.pid_exists(server) and psutil.Process(server).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("servers", "words"),
    [
        ({"a": {"command": "no-such-program"}}, r"mcpServers\.a\.command: there is no program 'no-such-program'"),
        ({"a": {}}, r"mcpServers\.a must have either command or url"),
        ({"a": {"url": "ftp://x"}}, r"mcpServers\.a\.url must start with http"),
        ({"a": {"url": "http://x", "type": "stdio"}}, r"is of type 'stdio', which does not fit its url"),
        ({"a": {"url": "http://x", "headers": {"K": "${NO_SUCH}"}}}, r"variable NO_SUCH, which is not set"),
        ({"a": {"comand": "x"}}, r"unknown field `comand`"),
        ({}, "names no server"),
    ],
)
def test_a_file_that_can_not_be_used_is_refused(servers, words, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=words):
        read_servers(write(tmp_path, monkeypatch, **servers))


def test_variables_are_filled_in(tmp_path, monkeypatch):
    monkeypatch.setenv("KEY", "secret")
    path = write(tmp_path, monkeypatch, a={"url": "https://h/${KEY}", "headers": {"A": "Bearer ${KEY}"}})
    (entry,) = read_servers(path)
    assert (entry.url, entry.headers) == ("https://h/secret", (("A", "Bearer secret"),))


def test_the_file_of_the_guide_can_be_read(tmp_path, monkeypatch):
    monkeypatch.setenv("KEY", "secret")
    text = GUIDE.read_text().partition("```json\n")[2].partition("```")[0]
    entries = json.loads(text)["mcpServers"]
    entries["words"]["command"] = sys.executable
    words, search = read_servers(write(tmp_path, monkeypatch, **entries))
    assert words.command == (sys.executable, "mcp_tool.py", "serve")
    assert search.headers == (("Authorization", "Bearer secret"),)


def test_a_file_that_was_not_allowed_starts_nothing(tmp_path, monkeypatch):
    path = write(tmp_path, monkeypatch, trusted=False, a=stdio(tmp_path))
    with pytest.raises(ConfigError, match=r"MCPConfig\.servers=.*you have not allowed.*--trust"):
        read_servers(path)


def test_a_server_that_does_not_start_is_named_with_its_last_words(tmp_path, monkeypatch):
    entry = {"command": sys.executable, "args": ["-c", "import sys; sys.exit('no license')"]}
    config = AgentConfig(mcp=MCPConfig(servers=write(tmp_path, monkeypatch, a=entry)))
    with pytest.raises(ConfigError, match=r"The MCP server a \(.*\) can't be used: .*its stderr: no license"):
        configured_agent(config, "")
    closed = AgentConfig(mcp=MCPConfig(servers=write(tmp_path, monkeypatch, a={"url": "http://127.0.0.1:9/mcp"})))
    with pytest.raises(ConfigError, match=r"The MCP server a \(http://127\.0\.0\.1:9/mcp\) can't be used"):
        configured_agent(closed, "")


def test_a_server_is_asked_for_its_tools_once_for_each_run(tmp_path, monkeypatch):
    lists = [[ListedTool("old", "", {})], [ListedTool("new", "", {})]]

    async def listed(server, timeout_s):
        return lists.pop(0)

    monkeypatch.setattr(connection, "list_tools", listed)
    config = AgentConfig(mcp=MCPConfig(servers=write(tmp_path, monkeypatch, a={"url": "http://127.0.0.1:9/mcp"})))
    for name in ("old", "new"):
        forget_servers()
        for _ in range(2):
            (tool,) = mcp_tools(config)
            assert described(tool.make())["function"]["name"] == name
    forget_servers()


def test_tools_that_no_server_has_are_refused(tmp_path, monkeypatch):
    path = write(tmp_path, monkeypatch, letters=stdio(tmp_path))
    with pytest.raises(
        ConfigError, match=r"MCPConfig\.tools must be tools of the servers, which have add, .*; got adds"
    ):
        configured_agent(AgentConfig(mcp=MCPConfig(servers=path, tools=("adds",))), "")
    assert described(mcp_tools(AgentConfig(mcp=MCPConfig(servers=path)))[0].make())["type"] == "function"
