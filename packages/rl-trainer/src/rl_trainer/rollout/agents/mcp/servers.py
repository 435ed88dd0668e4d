"""The file of MCP servers, as other clients of MCP read it.

    {"mcpServers": {
       "calculator": {"command": "python", "args": ["calculator.py"], "env": {"DIGITS": "12"}},
       "search": {"url": "http://127.0.0.1:8000/mcp", "headers": {"X-Key": "${KEY}"}}}}

`${NAME}` in a value stands for an environment variable. Further keys are refused.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import msgspec

from rl_protocol import ConfigError
from rl_protocol.errors import UNREADABLE
from rl_protocol.support.trusted_files import read_trusted

KEY = "MCPConfig.servers"
_VARIABLE = re.compile(r"\$\{(\w+)\}")


@dataclass(frozen=True, slots=True)
class ServerEntry:
    """A server of the file: a program of this host, or an URL.

    Attributes:
        name: its name in the file.
        command: the program and its arguments, which speaks MCP over stdin and stdout; empty: the
            server has an URL.
        env: environment variables of the program, besides HOME, PATH and a few of their kind.
        cwd: folder that it runs in; empty: that of this process.
        url: streamable HTTP endpoint; empty: the server is a program.
        headers: HTTP headers of each request.
    """

    name: str
    command: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    cwd: str = ""
    url: str = ""
    headers: tuple[tuple[str, str], ...] = ()


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["stdio", "http", "streamable-http"] | None = None
    command: str = ""
    args: tuple[str, ...] = ()
    env: dict[str, str] = {}
    cwd: str = ""
    url: str = ""
    headers: dict[str, str] = {}


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    servers: dict[str, _Entry] = msgspec.field(name="mcpServers")


def read_servers(path: str, environment: Mapping[str, str] = os.environ) -> list[ServerEntry]:
    """The servers of a file, which says what programs run and so must be trusted.

    Args:
        path: the file.
        environment: has the trusted files, and the variables that the file names.

    Raises:
        ConfigError: the file can't be read, is not trusted, or has another form; a program does not
            exist, or a variable is not set.
    """
    _, content = read_trusted(path, KEY, environment)
    try:
        found = msgspec.json.decode(content, type=_File)
    except UNREADABLE as error:
        raise ConfigError(f'{KEY}={path!r} must be {{"mcpServers": {{NAME: {{..}}}}}}: {error}.') from error
    if not found.servers:
        raise ConfigError(f"{KEY}={path!r} names no server.")
    return [_entry(name, one, path, environment) for name, one in found.servers.items()]


def _entry(name: str, one: _Entry, path: str, environment: Mapping[str, str]) -> ServerEntry:
    where = f"{KEY}={path!r}: mcpServers.{name}"
    if bool(one.command) == bool(one.url):
        raise ConfigError(f"{where} must have either command or url; got {one.command!r} and {one.url!r}.")
    if one.type is not None and (one.type == "stdio") != bool(one.command):
        raise ConfigError(
            f"{where} is of type {one.type!r}, which does not fit its {'command' if one.command else 'url'}."
        )

    def filled(text: str) -> str:
        return _VARIABLE.sub(lambda found: _variable(found[1], where, environment), text)

    command = tuple(map(filled, (one.command, *one.args))) if one.command else ()
    if command and shutil.which(command[0]) is None:
        raise ConfigError(f"{where}.command: there is no program {command[0]!r}; install it, or give its path.")
    url = filled(one.url)
    if url and not url.startswith(("http://", "https://")):
        raise ConfigError(f"{where}.url must start with http:// or https://; got {url!r}.")
    return ServerEntry(
        name,
        command=command,
        env=tuple((key, filled(value)) for key, value in one.env.items()),
        cwd=one.cwd,
        url=url,
        headers=tuple((key, filled(value)) for key, value in one.headers.items()),
    )


def _variable(name: str, where: str, environment: Mapping[str, str]) -> str:
    if name not in environment:
        raise ConfigError(f"{where} names the environment variable {name}, which is not set.")
    return environment[name]
