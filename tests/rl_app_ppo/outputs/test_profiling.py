"""Profiling of chosen steps: calls to the workers, their order, waiting, and the traces."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging

import pytest
import torch

from rl_app_ppo.config.loading import load_config
from rl_app_ppo.outputs.profiling import Profiling
from rl_app_ppo.verl_import.convert import import_verl
from rl_app_ppo.worker.torch_trace import Trace
from rl_protocol import ConfigError, WorkerError


class Told:
    """A worker that records its calls, and fails them if asked to."""

    def __init__(self, name, told, fails=False):
        self.name = name
        self._told = told
        self._fails = fails

    def send(self, method, payload):
        self._told.append((self.name, method, payload.decode()))

        async def wait():
            self._told.append((self.name, "waited", ""))
            if self._fails:
                raise WorkerError("it died")
            return b""

        return wait


def test_chosen_steps_are_traced_and_traces_waited_for(tmp_path, caplog):
    told, drawn = [], []
    workers = [Told("actor", told), Told("rollout-0", told, fails=True)]
    profiling = Profiling(tmp_path, frozenset({2}), workers, drawn.append)
    for step in (1, 2, 3):
        profiling.on_step_begin(step)
        profiling.on_step_end(step, {})
    paths = {name: str(tmp_path / "step-000002" / f"{name}.json.gz") for name in ("actor", "rollout-0")}
    assert told == [
        (name, f"profile.{what}", paths[name]) for what in ("begin", "end") for name in ("actor", "rollout-0")
    ]
    with caplog.at_level(logging.WARNING):
        asyncio.run(profiling.close())
    assert [one for one in told[4:] if one[1] == "waited"] == told[4:]
    assert len(told) == 8
    assert drawn == [tmp_path / "ray.json"]
    assert [record.getMessage() for record in caplog.records] == [
        "profile.begin of rollout-0 in step 2 failed: it died",
        "profile.end of rollout-0 in step 2 failed: it died",
    ]


def test_a_run_that_never_came_to_its_step_leaves_nothing(tmp_path):
    drawn = []
    asyncio.run(Profiling(tmp_path, frozenset({9}), [Told("actor", [])], drawn.append).close())
    assert drawn == []


def test_a_trace_holds_what_torch_did(tmp_path):
    trace = Trace()
    torch.ones(4, 4) @ torch.ones(4, 4)
    trace.write(tmp_path / "deep" / "trace.json.gz")
    events = json.loads(gzip.decompress((tmp_path / "deep" / "trace.json.gz").read_bytes()))["traceEvents"]
    assert "aten::matmul" in {event.get("name") for event in events}


@pytest.mark.parametrize(
    ("given", "steps"), [("2,5", (2, 5)), ("[2,5]", (2, 5)), ("3", (3,)), ("", ()), ("[]", ()), ("null", ())]
)
def test_steps_are_named_as_numbers_or_a_list(given, steps):
    assert load_config([f"trainer.profile_steps={given}"]).trainer.profile_steps == steps


@pytest.mark.parametrize("given", ["0", "-1", "two", "1.5"])
def test_what_is_no_step_is_refused(given):
    with pytest.raises(ConfigError, match=r"trainer\.profile_steps must be (at least 1|of type list of int); got"):
        load_config([f"trainer.profile_steps={given}"])


def test_verl_has_another_name_for_them():
    assert import_verl({"global_profiler.steps": [1, 2]}).settings["trainer.profile_steps"] == [1, 2]
