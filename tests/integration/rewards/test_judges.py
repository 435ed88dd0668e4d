"""A run whose responses a language model scores, over an endpoint on loopback."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest

DESCRIPTION = '''
kind = "judge"
url = "http://127.0.0.1:{port}/v1"
model = "stand-in"
cache = "answers.sqlite"
score_field = "overall"
highest = 4.0
attempts = 2
rubric = """
{{prompt}}
RESPONSE {{response}}
TRUTH {{ground_truth}}
"""
'''


class Handler(BaseHTTPRequestHandler):
    """Scores a response by its number of characters, and gives no score for truths that end in 0.

    Some questions are refused at first, as too many.
    """

    seen: ClassVar[list[str]] = []
    lock = threading.Lock()

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        asked = body["messages"][0]["content"]
        with self.lock:
            busy = asked not in self.seen and len(self.seen) % 7 == 6
            self.seen.append(asked)
        said, _, truth = asked.partition("RESPONSE ")[2].partition("\nTRUTH ")
        overall = min(len(said), 4)
        verdict = json.dumps({"overall": overall, "form": 4 - overall}) if truth.strip()[-1] != "0" else "It is good."
        answer = b"" if busy else json.dumps({"choices": [{"message": {"content": verdict}}]}).encode()
        self.send_response(429 if busy else 200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_):
        pass


@contextmanager
def judging():
    """Yield the port."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.slow
def test_a_judge_scores_a_run_and_is_asked_once_for_equal_responses(app, tmp_path):
    with judging() as port:
        (tmp_path / "judge.toml").write_text(DESCRIPTION.format(port=port))
        done = app(
            *("--trust", "judge.toml", "reward.function=0.5*exact_match,0.5*judge.toml@sums,0.1*judge.toml#form"),
            *("reward.timeout_s=60", "trainer.total_training_steps=2", "trainer.test_freq=2", "data.val_size=16"),
            *("data.train_batch_size=8", "actor.ppo_mini_batch_size=8", "rollout.n=8", "rollout.response_length=4"),
        )
    assert done.code == 0, done.err
    steps = [one for one in done.metrics if "reward/extra/judge.toml/score" in one]
    assert len(steps) == 2
    for step in steps:
        score, form = step["reward/extra/judge.toml/score"], step["reward/extra/judge.toml/form"]
        assert score + form == pytest.approx(1)
        assert step["critic/score/mean"] == pytest.approx(
            0.5 * step["reward/extra/exact_match/score"] + 0.5 * score + 0.1 * form, rel=1e-5
        )
        assert 0 < step["reward/extra/judge.toml/cached"] < 1
    with contextlib.closing(sqlite3.connect(tmp_path / "answers.sqlite")) as database:
        (kept,) = database.execute("SELECT count(*) FROM answers").fetchone()
    scored = {asked for asked in Handler.seen if asked.split("TRUTH ")[1].strip()[-1] != "0"}
    assert kept == len(scored)
    samples = [json.loads(line) for line in (done.folder / "samples" / "2.jsonl").read_text().splitlines()]
    judged = [one["outcome"] for one in samples if one["outcome"]["type"] == "scored"]
    assert all("overall" in one["texts"]["judgement"] for one in judged)
