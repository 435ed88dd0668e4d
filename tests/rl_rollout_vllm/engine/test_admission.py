"""Admission control: several reasons to be closed, and failures."""

from __future__ import annotations

import asyncio

import pytest

from rl_protocol import RolloutError
from rl_rollout_vllm import TornWeightsError
from rl_rollout_vllm.engine.admission import AdmissionControl


def test_requests_wait_until_every_reason_is_gone():
    async def scenario():
        admission = AdmissionControl()
        admission.close("pause", "it is paused")
        admission.close("sleep", "it sleeps")
        admission.close("sleep", "it sleeps")
        waiting = asyncio.ensure_future(admission.enter(60))
        assert not admission.would_admit_without("pause")
        admission.reopen("sleep")
        await asyncio.sleep(0)
        assert not waiting.done()
        assert admission.would_admit_without("pause")
        admission.reopen("pause")
        await waiting

    asyncio.run(scenario())


def test_a_failure_ends_waiting_and_later_requests_until_it_recovers():
    async def scenario():
        admission = AdmissionControl()
        admission.close("update", "an update runs")
        waiting = asyncio.ensure_future(admission.enter(60))
        await asyncio.sleep(0)
        admission.fail(TornWeightsError("it broke off"))
        for request in (waiting, admission.enter(60)):
            with pytest.raises(TornWeightsError, match="it broke off"):
                await request
        assert not admission.would_admit_without("update")
        admission.recover()
        with pytest.raises(RolloutError, match=r"No request was admitted for 0\.01 s: an update runs"):
            await admission.enter(0.01)

    asyncio.run(scenario())
