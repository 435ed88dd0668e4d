"""Serves the report of a run on loopback while the run goes on: read-only, for who has the URL."""

from __future__ import annotations

import hmac
import logging
import secrets
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from rl_app_ppo.outputs.run_folder import RunFiles
from rl_app_ppo.report.page import report_page
from rl_app_ppo.report.run_data import RunData
from rl_protocol import ConfigError, OutputError

logger = logging.getLogger(__name__)
ADDRESS = "127.0.0.1"
RELOAD_S = 10
"""Seconds after which the browser loads the page again while the run goes on."""
SLOW_S = 10.0
"""Seconds that a client may take to send its request, or to read a part of the answer."""
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Type": "text/html; charset=utf-8",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class ReportServer:
    """Serves the report of a run; a context manager that ends its threads.

    Every answer is the page. A request needs the token of the URL, which other users of the host
    don't have, and the server's own name as Host, which a page of another site can't send even if
    its name resolves to loopback.

    Args:
        folder: of the run.
        port: to listen at; 0: a free one.

    Raises:
        ConfigError: it is no folder of a run.
        OutputError: the port is taken.
    """

    def __init__(self, folder: Path, port: int = 0) -> None:
        self._page = LivePage(folder)
        self._page.read()
        self._token = secrets.token_urlsafe(24)
        try:
            self._server = ThreadingHTTPServer((ADDRESS, port), self._handler())
        except OSError as error:
            raise OutputError(
                f"--port {port}: {error.strerror or error}. Choose another one, or 0 for a free one."
            ) from error
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, name="report-server", daemon=True)

    @property
    def url(self) -> str:
        return f"http://{ADDRESS}:{self._server.server_port}/{self._token}/"

    def __enter__(self) -> ReportServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            timeout = SLOW_S

            def do_GET(self) -> None:
                status, body, headers = server.answer(self.path, self.headers.get("Host", ""))
                self.send_response(status)
                for name, value in {**_HEADERS, **headers, "Content-Length": str(len(body))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            def version_string(self) -> str:
                return "rl"

            def log_message(self, format: str, *args: object) -> None:
                logger.debug("request %s", format % args)

        return Handler

    def answer(self, path: str, host: str) -> tuple[HTTPStatus, bytes, dict[str, str]]:
        """Status, body and further headers of the answer to a GET request."""
        port = self._server.server_port
        if host not in (f"{ADDRESS}:{port}", f"localhost:{port}"):
            return HTTPStatus.MISDIRECTED_REQUEST, b"wrong host", {}
        if not hmac.compare_digest(path.encode(), f"/{self._token}/".encode()):
            return HTTPStatus.NOT_FOUND, b"no such page: use the URL that rl watch printed", {}
        try:
            page, over = self._page.read()
        except ConfigError as error:
            logger.warning("%s", error)
            return HTTPStatus.SERVICE_UNAVAILABLE, b"the run can't be read now", {"Refresh": str(RELOAD_S)}
        return HTTPStatus.OK, page, {} if over else {"Refresh": str(RELOAD_S)}


class LivePage:
    """The report of a run, made again when its files have grown.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._sizes: dict[Path, int] = {}
        self._made: tuple[bytes, bool] | None = None

    def read(self) -> tuple[bytes, bool]:
        """The page, and whether the run is over.

        Raises:
            ConfigError: it is no folder of a run, or a file can't be read.
        """
        with self._lock:
            sizes = self._sizes_now()
            if self._made is None or sizes != self._sizes:
                run = RunData.read(self._folder)
                self._made, self._sizes = (report_page([run]), run.record.end is not None), sizes
            return self._made

    def _sizes_now(self) -> dict[Path, int]:
        files = RunFiles(folder=self._folder)
        try:
            return {path: path.stat().st_size for path in (files.metrics, *files.record.glob("*")) if path.exists()}
        except OSError as error:
            raise ConfigError(f"The run {self._folder} can't be read: {error}.") from error
