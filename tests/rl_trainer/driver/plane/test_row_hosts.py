"""Which runs ask the data plane where rows are, and which do not."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest

from rl_protocol import BatchData, KVBatchMeta, MissingDataError, dense
from rl_protocol.support.host_identity import this_host
from rl_protocol.testing.memory_data_plane import MemoryDataPlane
from rl_trainer import LoopConfig, Workers
from rl_trainer.driver.plane.row_hosts import RowFinder
from rl_trainer.driver.stage_calls import StepRows

TAGS = ({"prompt_len": 2, "response_len": 3}, {"prompt_len": 2, "response_len": 5})


def parts_of(hosts, plane, **loop):
    """The parts of a run whose actors are on these hosts."""
    actors = [SimpleNamespace(process=f"process {rank}") for rank in range(len(hosts))]
    workers = Workers(
        rollout=[],
        reward=actors[0],
        actor=actors,
        hosts={actor.process: host for actor, host in zip(actors, hosts, strict=True)},
    )
    return SimpleNamespace(plane=plane, workers=workers, loop=LoopConfig(**loop))


def placed(hosts, keys=("p0/0/0", "p1/0/0"), **loop):
    async def ask():
        plane = MemoryDataPlane()
        await plane.put("train", ["p0/0/0", "p1/0/0"], BatchData({"x": dense([1.0, 2.0])}))
        rows = StepRows.of(KVBatchMeta(partition="train", keys=keys, tags=TAGS))
        found = await RowFinder(parts_of(hosts, plane, **loop)).placed(rows)
        assert replace(found, placed=None).names == rows.names
        return found.placed

    return asyncio.run(ask())


def test_ranks_on_two_hosts_get_the_hosts_of_rows():
    found = placed([this_host(), "another"])
    assert (found.hosts, found.slack) == ((this_host(),), 0.05)
    near = found.near(["another", this_host()]).nbytes
    assert (near[:, 0] == 0).all()
    assert (near[:, 1] > 0).all()


@pytest.mark.parametrize(
    ("hosts", "loop"),
    [
        (["a", "a"], {}),
        (["a", "b"], {"deterministic": True}),
        (["a", "b"], {"keep_batches": 1}),
        (["a", "b"], {"local_rows_slack": 0.0}),
    ],
    ids=["one host", "deterministic", "kept batches", "no slack"],
)
def test_others_are_split_by_tokens_alone(hosts, loop):
    assert placed(hosts, **loop) is None


def test_a_row_that_is_not_there_is_named():
    with pytest.raises(MissingDataError, match="ghost/0/0"):
        placed(["a", "b"], keys=("p0/0/0", "ghost/0/0"))
