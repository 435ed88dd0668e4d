"""The HTTP scorer against a misbehaving server on loopback."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from contextlib import asynccontextmanager
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_protocol import ConfigError
from rl_protocol.support.trusted_files import given_files, variables_for
from rl_trainer.rewards import Failure, Sample, Scored
from rl_trainer.rewards.scorer_toml import RemoteScorerConfig, RewardModelConfig, read_scorer_toml
from rl_trainer.rewards.services.http_service import MOST_BYTES, RateLimiter, retry_delay
from rl_trainer.rewards.services.remote import RemoteScorer

KEY = "s3cret-of-the-judge"
MANNERS = {
    "fine": (200, b'{"score": 0.5, "acc": 1, "pred": "42"}'),
    "number": (200, b"0.25"),
    "null": (200, b"null"),
    "text": (200, b'"0.5"'),
    "no score": (200, b'{"acc": 1}'),
    "broken": (200, b'{"score": 0.5'),
    "nested": (200, b"[" * 100_000),
    "huge": (200, b'{"score": 1, "pred": "' + b"x" * (MOST_BYTES + 1) + b'"}'),
    "refused": (403, KEY.encode()),
    "moved": (302, b""),
    "broken inside": (500, b"a stack with " + KEY.encode()),
    "always busy": (429, b""),
}


class Judge:
    """A server whose answer depends on the response in the request."""

    def __init__(self):
        self.seen = []
        self.begun = []
        self.heads = []
        self.under_way = self.most_under_way = 0

    async def __call__(self, reader, writer):
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = int(
                    next(line for line in head.splitlines() if line.lower().startswith("content-length")).split(":")[1]
                )
                asked = json.loads(await reader.readexactly(length))
                self.heads.append(head)
                self.seen.append(asked)
                self.begun.append(time.monotonic())
                self.under_way += 1
                self.most_under_way = max(self.most_under_way, self.under_way)
                try:
                    if not await self._answer(asked["solution_str"], writer):
                        return
                finally:
                    self.under_way -= 1
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, manner, writer):
        before = sum(one["solution_str"] == manner for one in self.seen) - 1
        if manner == "closes":
            return False
        if manner == "stuck":
            await asyncio.sleep(300)
        if manner.startswith("slow"):  # until three wait, and then long enough for a fourth to come
            while self.most_under_way < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)
        status, body = MANNERS.get(manner, MANNERS["fine"])
        if manner == "busy twice" and before < 2:
            status, body = 429 + 74 * before, b""  # 429, then 503
        extra = "Location: http://127.0.0.1:1/\r\n" if status == 302 else ""
        writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n{extra}\r\n".encode())
        if manner == "drips":
            for byte in body:
                writer.write(bytes([byte]))
                await writer.drain()
                await asyncio.sleep(0.5)
        elif manner == "cut off":
            writer.write(body[:5])
            await writer.drain()
            return False
        writer.write(body)
        await writer.drain()
        return True


@asynccontextmanager
async def judging(**facts):
    """Yield (judge, scorer); `facts` are `timeout_s` and fields of RemoteScorerConfig."""
    judge, timeout_s = Judge(), facts.pop("timeout_s", 60.0)
    server = await asyncio.start_server(judge, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    scorer = RemoteScorer(
        RemoteScorerConfig(url=f"http://127.0.0.1:{port}/score?k=hidden", **facts), timeout_s, {"JUDGE_KEY": KEY}
    )
    try:
        yield judge, scorer
    finally:
        await scorer.close()
        await scorer.close()
        server.close()


def asked(*manners):
    return [
        Sample(data_source="s", solution_str=m, ground_truth="g", extra_info={"n": 1}, tokens=[1, 2]) for m in manners
    ]


def score(manners, **facts):
    async def run():
        async with judging(**facts) as (judge, scorer):
            return judge, await scorer.score(asked(*manners))

    return asyncio.run(run())


def test_it_is_asked_what_a_reward_function_is_asked_and_its_answers_are_scores():
    judge, outcomes = score(["fine", "number"], key_variable="JUDGE_KEY")
    assert outcomes[0] == Scored(numbers={"score": 0.5, "acc": 1.0}, texts={"pred": "42"})
    assert outcomes[1] == Scored(numbers={"acc": 0.25, "score": 0.25})
    assert judge.seen[0].keys() == {"data_source", "solution_str", "ground_truth", "extra_info"}
    assert {one["solution_str"] for one in judge.seen} == {"fine", "number"}
    assert judge.seen[0]["extra_info"] == {"n": 1}
    assert all(f"Authorization: Bearer {KEY}\r\n" in head for head in judge.heads)
    _, without = score(["fine"])
    assert without == outcomes[:1]


def test_every_misbehaviour_is_the_failure_of_its_sample_and_of_no_other(caplog):
    expected = {
        "null": "no_number",
        "text": "no_number",
        "no score": "no_number",
        "broken": "no_number",
        "nested": "no_number",
        "huge": "no_number",
        "refused": "exception",
        "moved": "exception",
        "broken inside": "exception",
        "always busy": "exception",
        "closes": "exception",
        "cut off": "exception",
    }
    manners = [one for bad in expected for one in (bad, "fine")]
    with caplog.at_level(logging.DEBUG):
        judge, outcomes = score(manners, attempts=2, key_variable="JUDGE_KEY")
    kinds = [one.kind if isinstance(one, Failure) else one.numbers["score"] for one in outcomes]
    assert kinds == [one for kind in expected.values() for one in (kind, 0.5)]
    said = {m: one.message for m, one in zip(manners, outcomes, strict=True) if isinstance(one, Failure)}
    assert said["refused"] == "was refused with status 403"
    assert said["broken inside"] == "got no answer in 2 attempts: status 500"
    assert said["closes"] == "got no answer in 2 attempts: the connection failed (ServerDisconnectedError)"
    assert said["huge"] == f"answered with more than {MOST_BYTES} bytes"
    times = {m: sum(one["solution_str"] == m for one in judge.seen) for m in expected}
    assert times == {m: 2 if m in ("broken inside", "always busy", "closes", "cut off") else 1 for m in expected}
    everything = caplog.text + "".join(said.values())
    assert KEY not in everything
    assert "hidden" not in everything


def test_busy_and_broken_services_are_asked_again():
    judge, outcomes = score(["busy twice"])
    assert outcomes == [Scored(numbers={"score": 0.5, "acc": 1.0}, texts={"pred": "42"})]
    first, second = judge.begun[1] - judge.begun[0], judge.begun[2] - judge.begun[1]
    assert first >= 0.25 * 0.99
    assert second >= 0.5 * 0.99


def test_those_that_are_late_are_given_up_alone():
    _, outcomes = score(["stuck", "drips", "fine"], timeout_s=8.0)
    assert outcomes[:2] == [Failure(kind="timeout", message="did not return within 8 s (RemoteScorer.timeout_s)")] * 2
    assert isinstance(outcomes[2], Scored)


def test_no_more_are_under_way_than_allowed():
    judge, outcomes = score([f"slow {i}" for i in range(12)], concurrency=3)
    assert all(isinstance(one, Scored) for one in outcomes)
    assert judge.most_under_way == 3


def test_requests_begin_no_faster_than_allowed():
    start = time.monotonic()
    judge, _ = score([f"fine {i}" for i in range(11)], requests_per_s=20.0)
    assert judge.begun[-1] - start >= 10 / 20 * 0.99, "ten gaps come before the eleventh"


def test_waiting_for_a_turn_is_not_held_against_a_sample():
    """The second sample waits longer than the timeout of one."""
    start = time.monotonic()
    _, outcomes = score(["fine 0", "fine 1"], requests_per_s=1 / 6, timeout_s=5.5)
    assert time.monotonic() - start > 5.5
    assert all(isinstance(one, Scored) for one in outcomes)


@given(st.lists(st.floats(0, 3), max_size=40), st.floats(0.5, 50))
def test_the_pace_is_kept_whenever_requests_come(gaps, per_s):
    pace, now, begun = RateLimiter(per_s), 0.0, []
    for gap in gaps:
        now += gap
        wait = pace.wait(now)
        assert wait >= 0
        begun.append(now + wait)
    assert all(later - before >= 1 / per_s - 1e-9 for before, later in pairwise(begun))
    assert all(RateLimiter(0).wait(gap) == 0 for gap in gaps)


def test_waits_double_and_the_service_may_ask_for_more():
    assert [retry_delay(attempt, "") for attempt in (1, 2, 3)] == [0.25, 0.5, 1.0]
    assert retry_delay(1, "7") == 7.0
    assert retry_delay(3, "0") == 1.0
    assert retry_delay(1, "Wed, 21 Oct 2015 07:28:00 GMT") == 0.25


def test_a_key_that_is_not_there_ends_the_run():
    async def make(value):
        RemoteScorer(RemoteScorerConfig(url="http://127.0.0.1/", key_variable="JUDGE_KEY"), 1.0, {"JUDGE_KEY": value})

    for value in ("", "two\nlines"):
        with pytest.raises(ConfigError, match=r"JUDGE_KEY \(key_variable\) contains no key") as caught:
            asyncio.run(make(value))
        assert not value or value not in str(caught.value)


# -- judge descriptions
def test_a_description_is_read_if_the_user_allows_it(tmp_path):
    path = tmp_path / "judge.toml"
    path.write_text('kind = "remote"\nurl = "https://judge.example/score"\nrequests_per_s = 2.5\nkey_variable = "K"\n')
    allowed = variables_for(given_files([path], "trust"))
    assert read_scorer_toml(str(path), allowed) == RemoteScorerConfig(
        url="https://judge.example/score", requests_per_s=2.5, key_variable="K"
    )
    with pytest.raises(ConfigError, match=rf"add --trust {path} to the command"):
        read_scorer_toml(str(path), {})
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    path.write_text(f'kind = "model"\npath = "{tmp_path / "m"}"\n')
    allowed = variables_for(given_files([path], "trust"))
    assert read_scorer_toml(str(path), allowed) == RewardModelConfig(path=str(tmp_path / "m"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('kind = "remote"\nurl = "ftp://x"', "url must be http"),
        ('kind = "remote"\nurl = "http:///x"', "url must be http"),
        ('kind = "remote"\nurl = "https://me:pw@x/"', "must not contain a password"),
        ('kind = "remote"\nurl = "http://10.0.0.1/"\nkey_variable = "K"', "must be https:// if a key"),
        ('kind = "remote"\nurl = "https://x"\nrequests_per_s = -1.0', "requests_per_s must be at least 0"),
        ('kind = "remote"\nurl = "https://x"\nconcurrency = 0', "concurrency must be at least 1"),
        ('kind = "remote"\nurl = "https://x"\nattempts = 0', "attempts must be at least 1"),
        ('kind = "remote"\nurl = "https://x"\ntimeout = 3', "unknown field `timeout`"),
        ('kind = "remotely"\nurl = "https://x"', "Invalid value 'remotely'"),
        ('kind = "model"\npath = "nowhere"', "not a folder with a config.json"),
        ('kind = "model"\npath = "."\ndevice = "tpu"', "not a folder|device must be"),
        ("= x", "can't be read"),
    ],
)
def test_what_a_description_can_not_mean_is_named(tmp_path, text, message):
    path = tmp_path / "judge.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        read_scorer_toml(str(path), variables_for(given_files([path], "trust")))
    assert "pw" not in str(caught.value)
