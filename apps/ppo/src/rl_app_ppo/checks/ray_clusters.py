"""Check the Ray that a run would meet or start: the cluster of `ray.address`, others on this
machine, and the folder of one for the run alone."""

from __future__ import annotations

import json
import os
import platform
import socket
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

from rl_app_ppo.config.schema import LOCAL, RayConfig
from rl_protocol import ConfigError
from rl_protocol.support.host.portable import SOCKET_PATH_LIMIT

_ANSWER_TIMEOUT_S = 5.0
_ADDRESS = "RAY_ADDRESS"
_FOLDER = "RAY_TMPDIR"
RAY_PREFIX = "rl-app-ppo-ray-"
"""Of the folder of a Ray for the run alone."""
_LONGEST_SOCKET = RAY_PREFIX + "12345678/ray/session_2026-12-31_23-59-59_999999_{pid}/sockets/plasma_store"
"""Of the sockets in that folder; the process is that of the driver."""
_SERVER = "gcs_server"
"""Name of the process that every Ray cluster has once."""
_HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""How a client of gRPC, which Ray speaks, begins: RFC 9113, section 3.4, with empty SETTINGS."""
_SETTINGS = 4
"""Type of the frame that such a server answers with, the fourth byte."""


def check_cluster(config: RayConfig) -> str:
    """Check that a Ray of this version answers at `ray.address`; Ray itself would wait minutes.

    Returns:
        What was found.

    Raises:
        ConfigError: nothing answers there, something else than Ray does, or another version of Ray
            or Python.
    """
    if config.address == LOCAL:
        return f"ray.address={LOCAL} starts Ray {version('ray')} for the run alone"
    address = _address(config.address)
    host, _, port = address.rpartition(":")
    if "://" in host or not host or not port.isdecimal():
        return f"{address} is known when the run joins it"  # Ray checks other forms
    remedy = (
        f"Start one (ray start --head --port={port}) or give the address that it printed; ray.address={LOCAL} starts "
        "Ray for this run alone."
    )
    try:
        if not _speaks_http2(host.strip("[]"), int(port)):
            raise ConfigError(f"What answers at ray.address={address} is no Ray cluster. {remedy}")
    except (OSError, OverflowError) as error:
        raise ConfigError(f"No Ray cluster answers at ray.address={address}: {error}. {remedy}") from error
    return f"a cluster of Ray {_same_version(address)} answers at {address}"


def _address(given: str) -> str:
    """The host:port that Ray would join."""
    if given != "auto":
        return given
    from ray._private.services import get_ray_address_from_environment  # takes a second to import

    _enable_token()
    try:
        return get_ray_address_from_environment(given, None)
    except ConnectionError as error:
        raise ConfigError(
            f"ray.address=auto finds no Ray cluster: none runs on this machine, and {_ADDRESS} is not set. Start one (ray start --head), or "
            f"give its host:port; ray.address={LOCAL} starts Ray for this run alone."
        ) from error


def _enable_token() -> None:
    """Answer a cluster with the user's token, as ray.init(address="auto") does later.

    `ray start` requires the token of ~/.ray/auth_token where there is one, and a Ray that starts
    for a run writes it.
    """
    setup: Any = import_module("ray._private.authentication.authentication_token_setup")
    setup.logger.disabled = True  # its warning is for who starts a cluster
    try:
        setup.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    finally:
        setup.logger.disabled = False


def _speaks_http2(host: str, port: int) -> bool:
    with socket.create_connection((host, port), timeout=_ANSWER_TIMEOUT_S) as peer:
        peer.sendall(_HTTP2)
        try:
            return peer.recv(4, socket.MSG_WAITALL)[3:] == bytes([_SETTINGS])
        except (TimeoutError, ConnectionError):
            return False


def _same_version(address: str) -> str:
    """The versions of the cluster, which are ours."""
    from ray.exceptions import RayError

    raylet: Any = import_module("ray._raylet")  # it has no annotations
    try:
        stored = raylet.GcsClient(address=address).internal_kv_get(
            b"CLUSTER_METADATA", namespace=b"cluster", timeout=_ANSWER_TIMEOUT_S
        )
    except RayError as error:
        raise ConfigError(
            f"The cluster of ray.address={address} refuses this process: {error}. If it requires a token, set RAY_AUTH_MODE=token, "
            f"and RAY_AUTH_TOKEN_PATH as on the cluster; there ray.address=auto does that. ray.address={LOCAL} starts Ray for this run alone."
        ) from error
    theirs = json.loads(stored or b"{}")
    ours = {"ray_version": version("ray"), "python_version": platform.python_version()}
    if any(theirs.get(name, value) != value for name, value in ours.items()):
        raise ConfigError(
            f"The cluster of ray.address={address} runs Ray {theirs.get('ray_version')} and Python {theirs.get('python_version')}, this process "
            f"{ours['ray_version']} and {ours['python_version']}. Install the cluster's Ray and Python here, or give the address of another "
            f"cluster; ray.address={LOCAL} starts Ray on this machine alone."
        )
    return f"{ours['ray_version']} with Python {ours['python_version']}"


def check_address_is_read(config: RayConfig) -> str:
    """Check that the cluster of RAY_ADDRESS, if it is set, is the one of the run.

    Raises:
        ConfigError: ray.address is another.
    """
    theirs = os.environ.get(_ADDRESS, "")
    if theirs and config.address not in ("auto", theirs):
        raise ConfigError(
            f"{_ADDRESS}={theirs} is set, and ray.address={config.address} does not use it: set ray.address=auto to train on that cluster, or "
            f"unset {_ADDRESS}"
        )
    return f"{_ADDRESS}={theirs} is used" if theirs else f"{_ADDRESS} is not set"


def ray_folder() -> Path:
    """Where a Ray for the run alone gets its folder: RAY_TMPDIR or /tmp, as TMPDIR may be long."""
    return Path(os.environ.get(_FOLDER) or "/tmp").absolute()


def check_ray_folder(config: RayConfig) -> str:
    """Check that a Ray for the run alone can have its folder with its sockets.

    Raises:
        ConfigError: it can't: there is no such folder, no right to write there, or its path is too
            long.
    """
    if config.address != LOCAL:
        return "that of the cluster"
    folder = ray_folder()
    where = f"{_FOLDER}={folder}, in which Ray gets its folder (/tmp where it is not set),"
    remedy = f"Set {_FOLDER} to a local folder with a short path, or unset it."
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"{where} must be a folder in which this user may write. {remedy}")
    most = SOCKET_PATH_LIMIT - len(f"/{_LONGEST_SOCKET.format(pid=os.getpid())}")
    if len(os.fsencode(folder)) > most:
        raise ConfigError(
            f"{where} must have a path of at most {most} bytes, because those of its sockets have at most {SOCKET_PATH_LIMIT}; got "
            f"{len(os.fsencode(folder))}. {remedy}"
        )
    return str(folder)


def check_no_other(config: RayConfig) -> None:
    """Check that no cluster of Ray runs on this machine beside that of the run.

    Raises:
        ConfigError: one does; names its process and user.
    """
    if config.address != LOCAL:
        return
    others = [
        f"process {one.info['pid']} of {one.info['username']}"
        for one in psutil.process_iter(["name", "pid", "username"])
        if one.info["name"] == _SERVER
    ]
    if others:
        raise ConfigError(
            f"Ray runs on this machine already ({_SERVER}: {', '.join(others)}), and a run with ray.address={LOCAL} starts its own beside it: "
            "both use the same CPUs, GPUs and memory. Wait for its end, stop it (ray stop), or train on it with ray.address=auto"
        )
