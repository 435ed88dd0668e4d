from __future__ import annotations

import msgspec

from rl_app_ppo.watchdog.unanswered_calls import SHOWN, CallLog, OpenCall
from rl_protocol import KVBatchMeta
from rl_protocol.ports import Lease, SamplingParams
from rl_trainer.workers.messages import FinishSaveCall, LeasedPrompt, Partition, ReadAheadCall, RolloutCall, StageCall

PARTITION = Partition(name="train", split="train", step=7, n=2, sampling=SamplingParams(max_new_tokens=4))


def described(method: str, message: object) -> str:
    return OpenCall("worker-1", method, msgspec.msgpack.encode(message), 10.0).describe(13.4)


def test_a_rollout_names_its_step_and_prompts():
    leases = [Lease("train", f"s7-{i}", 0, (0, 1), 6, 600.0) for i in range(SHOWN + 2)]
    call = RolloutCall(partition=PARTITION, prompts=tuple(LeasedPrompt(lease, 3) for lease in leases[:2]))
    assert described("rollout", call) == "worker-1 has not answered 'rollout' for 3 s: step 7, prompts s7-0, s7-1"
    many = RolloutCall(partition=PARTITION, prompts=tuple(LeasedPrompt(lease, 3) for lease in leases))
    assert described("rollout", many).endswith("s7-6, s7-7 and 2 more")


def test_a_stage_names_its_step_rows_and_prompts():
    rows = KVBatchMeta(partition="train", keys=("s7-0/0/0", "s7-0/1/0", "s7-1/0/0"))
    assert described("adv", StageCall(step=7, batch=rows)).endswith(": step 7, 3 rows of prompts s7-0, s7-1")
    assert described("read_ahead", ReadAheadCall(stage="ref", batch=rows)).endswith(": 3 rows of prompts s7-0, s7-1")


def test_other_messages_are_named_by_their_method():
    assert described("finish_save", FinishSaveCall()) == "worker-1 has not answered 'finish_save' for 3 s"
    assert OpenCall("r", "weights.send", b"\xc1", 0.0).describe(1.0) == "r has not answered 'weights.send' for 1 s"


def test_a_call_that_failed_has_ended():
    log = CallLog()
    try:
        with log.waiting("a", "x", b""), log.waiting("b", "y", b""):
            assert [call.worker for call in log.open()] == ["a", "b"]
            raise LookupError
    except LookupError:
        assert (log.open(), log.ended) == ([], 2)
