"""The live report is for who has the URL, on loopback, and can only be read."""

from __future__ import annotations

import http.client
import socket
import time
from urllib.parse import urlsplit

import pytest
from hostile_run import write_run
from typer.testing import CliRunner

from rl_app_ppo.cli import rl
from rl_app_ppo.watch.server import ReportServer
from rl_protocol import ConfigError, OutputError
from rl_trainer.record.record_file import RecordFile
from rl_trainer.record.record_rows import EndRow


@pytest.fixture
def folder(tmp_path):
    return write_run(tmp_path / "run", steps=2, outcome="", texts=("a", "b"))


@pytest.fixture
def server(folder):
    with ReportServer(folder) as server:
        yield server


def ask(server, path=None, method="GET", **headers):
    """Status, headers and body of an answer."""
    url = urlsplit(server.url)
    connection = http.client.HTTPConnection(url.hostname, url.port, timeout=30)
    try:
        connection.request(method, url.path if path is None else path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()
    finally:
        connection.close()


def test_the_page_is_the_report_and_reloads_until_the_run_is_over(server, folder):
    status, headers, body = ask(server)
    assert (status, headers["Refresh"], headers["Cache-Control"]) == (200, "10", "no-store")
    assert b"Content-Security-Policy" in body
    assert ask(server)[2] == body
    file = RecordFile(folder / "record", "driver")
    file.append([EndRow(at=time.time(), outcome="finished", text="")])
    file.close()
    status, headers, later = ask(server)
    assert (status, headers["Refresh"]) == (200, None)
    assert later != body


def test_another_host_or_token_gets_nothing(server):
    port = urlsplit(server.url).port
    assert ask(server, Host=f"localhost:{port}")[0] == 200
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1", f"127.0.0.1:{port + 1}", ""):
        status, _, body = ask(server, Host=host)
        assert (status, body) == (421, b"wrong host")
    token = urlsplit(server.url).path
    assert len(token) >= 32
    for path in ("/", token[:-1], token + "x", f"/x{token}", token + "?a=1", "/%00", "/\xe9"):
        status, _, body = ask(server, path.encode("latin-1").decode("latin-1") if path.isascii() else "/%C3%A9")
        assert (status, body[:12]) == (404, b"no such page"), path


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "HEAD", "OPTIONS"])
def test_it_answers_only_to_get(server, method):
    assert ask(server, method=method)[0] == 501


def test_it_listens_on_loopback_alone_and_each_run_has_its_own_token(server, folder):
    url = urlsplit(server.url)
    assert url.hostname == "127.0.0.1"
    with ReportServer(folder) as other:
        assert urlsplit(other.url).path != url.path
    with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.2", url.port), timeout=5):
        pass
    with pytest.raises(OutputError, match=rf"--port {url.port}: Address already in use"):
        ReportServer(folder, url.port)
    done = CliRunner().invoke(rl.app, ["watch", str(folder), "--web", "--port", str(url.port)])
    assert done.exit_code == 2
    assert f"error: --port {url.port}: Address already in use. Choose another one" in done.output


def test_a_folder_that_is_no_run_is_refused_and_one_that_breaks_later_says_so(server, folder, tmp_path):
    with pytest.raises(ConfigError, match="is no folder of a run"):
        ReportServer(tmp_path)
    (folder / "config.yaml").unlink()
    (folder / "metrics.jsonl").write_text("")
    status, headers, body = ask(server)
    assert (status, headers["Refresh"], body) == (503, "10", b"the run can't be read now")
