"""Connections of ranks that are cut while all processes run."""

from __future__ import annotations

import multiprocessing
import pickle
import socket

import pytest
import torch
import torch.distributed as dist
from cut_connections import cut_all

from rl_app_ppo.worker.rank_connections import RankConnectionError, named_rank_connections
from rl_protocol import WorkerError
from rl_protocol.support.rendezvous import Rendezvous, RendezvousListener
from rl_trainer.backends.world import CPU, join_world


def reduce_until_cut(rank, address, listener, pipe):
    """A rank that waits for a word before each all-reduce, and sends what came of it."""
    meeting = Rendezvous(rank=rank, size=2, address=address, listener=listener)
    join_world(meeting, device=CPU, timeout_s=60, join_timeout_s=60)
    try:
        while True:
            with named_rank_connections(f"actor-{rank}", "update_actor"):
                total = torch.ones(1)
                dist.all_reduce(total)
            pipe.send(float(total))
            pipe.recv()
    except WorkerError as error:
        pipe.send(error)


def test_both_ranks_of_a_cut_connection_name_themselves_and_their_host():
    context = multiprocessing.get_context("fork")
    listener = RendezvousListener()
    ranks = []
    for rank in range(2):
        ours, theirs = context.Pipe()
        process = context.Process(
            target=reduce_until_cut, args=(rank, listener.address, None if rank else listener, theirs)
        )
        process.start()
        ranks.append((process, ours))
    try:
        assert [pipe.recv() for _, pipe in ranks] == [2.0, 2.0]
        cut_all(ranks[1][0].pid, ranks[0][0].pid)
        for _, pipe in ranks:
            pipe.send("again")
        errors = [pipe.recv() for _, pipe in ranks]
    finally:
        listener.close()
        for process, _ in ranks:
            process.kill()
            process.join(60)
    for rank, error in enumerate(errors):
        assert isinstance(error, RankConnectionError)
        assert f"Worker actor-{rank} on {socket.gethostname()} has lost its connection" in str(error)
        assert "during update_actor: " in str(error)
        assert "trainer.network_interface" in str(error)


@pytest.mark.parametrize(
    "error", [RuntimeError("shape mismatch"), RuntimeError("gloo is not built"), ValueError("Broken pipe")]
)
def test_other_errors_are_unchanged(error):
    with pytest.raises(type(error)) as caught, named_rank_connections("actor", "update_actor"):
        raise error
    assert caught.value is error


def test_the_error_keeps_its_type_across_processes():
    error = RankConnectionError("Worker actor-1 on node7 has lost its connection.")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
