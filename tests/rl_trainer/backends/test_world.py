"""Ranks that meet through a store of rank 0: who is missing is named within the deadline."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from rl_protocol import WorkerError
from rl_protocol.support.network_interface import NetworkInterface
from rl_protocol.support.rendezvous import Rendezvous, RendezvousListener
from rl_trainer.backends.world import CPU, join_world


@pytest.fixture(autouse=True)
def interface_variables(monkeypatch):
    """Restore the variables that `join_world` sets."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "before")


def join(timeout_s=0.5, **meeting):
    return join_world(Rendezvous(**meeting), device=CPU, timeout_s=60, join_timeout_s=timeout_s)


def test_a_rank_that_does_not_come_is_named_to_all_others():
    listener = RendezvousListener()
    with ThreadPoolExecutor(2) as threads:
        waiting = [
            threads.submit(join, rank=rank, size=4, address=listener.address, listener=None if rank else listener)
            for rank in (0, 2)
        ]
        errors = [str(future.exception(timeout=60)) for future in waiting]
    assert any("Rank 1, 3 of 4 did not join rank " in error for error in errors)
    for error in errors:  # that of the later one may be that rank 0 has given up
        assert "Rank 1, 3 of 4 did not join" in error or "rank 0 at 127.0.0.1:" in error


def test_a_rank_0_that_does_not_listen_is_named_with_its_address_and_the_interface():
    listener = RendezvousListener()
    listener.close()
    wanted = rf"Rank 1 of 2 .* rank 0 at 127\.0\.0\.1:{listener.address.port} within 0\.5 s.* lo \(127\.0\.0\.1\) .*Rendezvous\.interface"
    with pytest.raises(WorkerError, match=wanted):
        join(rank=1, size=2, address=listener.address)


RANK_0 = """
import sys
from rl_protocol.support.rendezvous import Rendezvous, RendezvousListener
import msgspec
listener = RendezvousListener()
print(msgspec.json.encode(listener.address).decode(), flush=True)
from rl_trainer.backends.world import CPU, join_world
join_world(Rendezvous(size=3, address=listener.address, listener=listener), device=CPU, timeout_s=60, join_timeout_s=300)
"""


@pytest.mark.slow
def test_a_rank_0_that_dies_while_others_wait_is_named_long_before_the_deadline():
    import msgspec
    import torch.distributed as dist

    from rl_protocol.support.rendezvous import RendezvousAddress

    program = subprocess.Popen([sys.executable, "-c", RANK_0], stdout=subprocess.PIPE, text=True)
    try:
        assert program.stdout is not None
        address = msgspec.json.decode(program.stdout.readline(), type=RendezvousAddress)
        with ThreadPoolExecutor(1) as thread:
            waiting = thread.submit(join, 3000, rank=1, size=3, address=address)
            watching = dist.TCPStore(address.host, address.port, None, False, wait_for_workers=False)
            while not watching.check([f"{address.key}/joined/1"]):
                time.sleep(0.05)
            program.kill()
            error = waiting.exception(timeout=300)
    finally:
        program.kill()
        program.communicate()
    assert isinstance(error, WorkerError)
    assert f"rank 0 at 127.0.0.1:{address.port}" in str(error)


@pytest.mark.parametrize(("chosen", "gloo"), [(True, "eth9"), (False, "before")])
def test_a_chosen_interface_overrides_the_environment_and_a_found_one_does_not(chosen, gloo):
    """Nobody listens; the variables are set before."""
    listener = RendezvousListener()
    listener.close()
    with pytest.raises(WorkerError):
        join(
            0.1,
            rank=1,
            size=2,
            address=listener.address,
            interface=NetworkInterface("eth9", "127.0.0.1"),
            chosen=chosen,
        )
    assert os.environ["GLOO_SOCKET_IFNAME"] == gloo
