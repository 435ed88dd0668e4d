"""Prometheus metrics of a plane and of one process's calls (extra `[metrics]`).

Off unless `serve_metrics` is called or `rl-tq metrics` runs. The endpoint has no authentication and
listens on 127.0.0.1 only.
"""

from __future__ import annotations

import functools
import inspect
import os
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, cast
from weakref import WeakKeyDictionary

try:
    from prometheus_client import CollectorRegistry, Counter, Histogram, start_http_server
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
    from prometheus_client.registry import Collector
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"{error.name} is not installed; pip install 'rl-transferqueue[metrics]'", name=error.name
    ) from error

from rl_protocol.batch.batch_data import BatchData
from rl_protocol.batch.kv_batch_meta import KVBatchMeta
from rl_protocol.errors import ConfigError, RLError
from rl_protocol.ports import DataPlane, PlaneStats
from rl_protocol.wire.draft import Draft
from rl_transferqueue.client.blocking_client import portal
from rl_transferqueue.client.client import connect
from rl_transferqueue.wire.descriptor import PlaneDescriptor
from rl_transferqueue.wire.messages import Metrics

LOOPBACK = "127.0.0.1"
_SCRAPE_S = 5.0
_BUCKETS_S = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1, 3, 10, 60)
_CALLS = frozenset(name for name, method in vars(DataPlane).items() if inspect.iscoroutinefunction(method))


class PlaneCollector(Collector):
    """Asks the controller at every scrape; a lost plane is `rl_tq_up 0`, not a failed scrape."""

    def __init__(self, look: Callable[[], tuple[PlaneStats, Metrics]]) -> None:
        self._look = look

    def collect(self) -> Iterator[Metric]:
        """Yield the metric families of the plane."""
        try:
            stats, metrics = self._look()
        except RLError:
            yield GaugeMetricFamily("rl_tq_up", "1 while the plane answers.", value=0)
            return
        yield GaugeMetricFamily("rl_tq_up", "1 while the plane answers.", value=1)
        yield from _gauges(stats, metrics)
        yield from _counters(stats, metrics)


def _gauges(stats: PlaneStats, metrics: Metrics) -> Iterator[Metric]:
    yield _labelled(GaugeMetricFamily, "rl_tq_rows", "Rows held.", "partition", stats.rows)
    yield GaugeMetricFamily("rl_tq_used_bytes", "Bytes held.", value=stats.bytes_used)
    yield GaugeMetricFamily("rl_tq_capacity_bytes", "Bytes that may be held.", value=stats.bytes_capacity)
    yield GaugeMetricFamily("rl_tq_clients", "Clients connected.", value=metrics.sessions)
    for_rows = metrics.waiting - metrics.waiting_puts
    yield GaugeMetricFamily("rl_tq_waiting_requests", "Requests that wait for rows.", value=for_rows)
    yield GaugeMetricFamily("rl_tq_waiting_puts", "Puts that wait for memory.", value=metrics.waiting_puts)
    yield GaugeMetricFamily("rl_tq_waiting_bytes", "Memory that they wait for.", value=metrics.waiting_bytes)
    longest = {name: count.longest_nanoseconds / 1e9 for name, count in metrics.operations.items()}
    text = "Longest the controller was busy with one request."
    yield _labelled(GaugeMetricFamily, "rl_tq_request_longest_seconds", text, "operation", longest)


def _counters(stats: PlaneStats, metrics: Metrics) -> Iterator[Metric]:
    operations, columns = metrics.operations, metrics.columns
    for name, text, label, values in (
        ("rl_tq_requests", "Requests.", "operation", {n: c.requests for n, c in operations.items()}),
        (
            "rl_tq_request_seconds",
            "Time the controller was busy with them.",
            "operation",
            {n: c.nanoseconds / 1e9 for n, c in operations.items()},
        ),
        (
            "rl_tq_received_bytes",
            "Bytes of requests.",
            "operation",
            {n: c.bytes_received for n, c in operations.items()},
        ),
        ("rl_tq_errors", "Requests answered with an error.", "error", metrics.errors),
        ("rl_tq_written_rows", "Rows put.", "column", {n: c.rows_written for n, c in columns.items()}),
        ("rl_tq_written_bytes", "Bytes put.", "column", {n: c.bytes_written for n, c in columns.items()}),
        ("rl_tq_located_rows", "Rows handed to readers.", "column", {n: c.rows_located for n, c in columns.items()}),
    ):
        yield _labelled(CounterMetricFamily, name, text, label, values)
    yield _labelled(CounterMetricFamily, "rl_tq_moved_bytes", "Bytes of puts and gets.", "link", stats.links)
    text = "Blocks damaged in memory, which were read again from the journal."
    yield CounterMetricFamily("rl_tq_damaged_blocks", text, value=stats.damaged)
    text = "Blocks that left memory for others, and are read again from the journal."
    yield CounterMetricFamily("rl_tq_evicted_blocks", text, value=stats.evicted)
    yield CounterMetricFamily("rl_tq_sent_bytes", "Bytes of answers of the controller.", value=metrics.bytes_sent)


def _labelled(
    family: type[GaugeMetricFamily] | type[CounterMetricFamily],
    name: str,
    text: str,
    label: str,
    values: Mapping[str, float],
) -> Metric:
    out = family(name, text, labels=[label])
    for key, value in values.items():
        out.add_metric([key], value)
    return out


class MetricsServer:
    """An HTTP endpoint on 127.0.0.1, made by `serve_metrics`.

    Lifecycle: serves until `close` or the end of the `with` block.
    """

    def __init__(self, registry: CollectorRegistry, port: int, close_plane: Callable[[], object]) -> None:
        try:
            self._httpd, self._thread = start_http_server(port, LOOPBACK, registry)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"Metrics can't be served on {LOOPBACK}:{port}: {error}. Choose another port.") from error
        self._close_plane = close_plane
        self._closed = threading.Event()

    @property
    def url(self) -> str:
        """The URL to scrape."""
        return f"http://{self.endpoint}/metrics"

    @property
    def endpoint(self) -> str:
        """host:port."""
        return f"{LOOPBACK}:{self._httpd.server_port}"

    def wait(self) -> None:
        """Block until another thread calls `close`, or an interrupt."""
        self._closed.wait()

    def close(self) -> None:
        """Stop serving; safe to call twice."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._httpd.shutdown()
        self._httpd.server_close()
        self._thread.join()
        self._close_plane()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def serve_metrics(
    descriptor: PlaneDescriptor, *, port: int = 0, registry: CollectorRegistry | None = None
) -> MetricsServer:
    """Serve the metrics of a plane on 127.0.0.1.

    Args:
        descriptor: the plane.
        port: 0 takes a free port; see `MetricsServer.url`.
        registry: also served, such as the one passed to `metered`; default: a new one.

    Raises:
        ConfigError: the port can't be used.
        PlaneLostError, PlaneTimeout: the plane does not answer.
    """
    on = portal()
    client = on.run(connect(descriptor))

    async def look() -> tuple[PlaneStats, Metrics]:
        return await client.stats(timeout_s=_SCRAPE_S), await client.metrics(timeout_s=_SCRAPE_S)

    registry = CollectorRegistry() if registry is None else registry
    collector = PlaneCollector(on.blocking(look))
    registry.register(collector)

    def close() -> None:
        registry.unregister(collector)
        on.run(client.close())

    try:
        return MetricsServer(registry, port, close)
    except BaseException:
        close()
        raise


def metered(plane: DataPlane, registry: CollectorRegistry) -> DataPlane:
    """Wrap a plane to count the seconds of every call and the bytes of every column in `registry`.

    Planes that share a registry are counted together.
    `rl_tq_client_seconds{operation}` is a histogram that includes waiting,
    `rl_tq_client_bytes_total{operation, column}` counts the bytes that this process put and got,
    and `rl_tq_client_errors_total{operation, error}` counts the calls that raised.
    """
    return cast(DataPlane, _Metered(plane, registry))


class _CallMetrics:
    """The metrics of the calls in one registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.seconds = Histogram(
            "rl_tq_client_seconds", "Seconds per call.", ["operation"], buckets=_BUCKETS_S, registry=registry
        )
        self.bytes = Counter(
            "rl_tq_client_bytes", "Payload bytes by column.", ["operation", "column"], registry=registry
        )
        self.errors = Counter("rl_tq_client_errors", "Calls that raised.", ["operation", "error"], registry=registry)


_of_registry: WeakKeyDictionary[CollectorRegistry, _CallMetrics] = WeakKeyDictionary()
_locks: dict[int, threading.Lock] = {}
"""One for each process, as a fork could find a lock taken for ever."""


def _call_metrics(registry: CollectorRegistry) -> _CallMetrics:
    """The metrics that the registry has; the first call adds them."""
    with _locks.setdefault(os.getpid(), threading.Lock()):
        if registry not in _of_registry:
            _of_registry[registry] = _CallMetrics(registry)
        return _of_registry[registry]


class _Metered:
    def __init__(self, plane: DataPlane, registry: CollectorRegistry) -> None:
        self._plane = plane
        self._metrics = _call_metrics(registry)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._plane, name)
        if name not in _CALLS:
            return found

        @functools.wraps(found)
        async def timed(*args: Any, **options: Any) -> Any:
            return await self._timed(name, found(*args, **options))

        return timed

    async def put(
        self, partition: str, keys: Sequence[str], data: BatchData | Draft | None = None, **options: Any
    ) -> KVBatchMeta:
        meta = await self._timed("put", self._plane.put(partition, keys, data, **options))
        self._count("put", data)
        return meta

    async def get(self, meta: KVBatchMeta, fields: Sequence[str] | None = None, **options: Any) -> BatchData:
        data = await self._timed("get", self._plane.get(meta, fields, **options))
        self._count("get", data)
        return data

    async def _timed(self, operation: str, call: Awaitable[Any]) -> Any:
        began = time.perf_counter()
        try:
            return await call
        except RLError as error:
            self._metrics.errors.labels(operation, type(error).__name__).inc()
            raise
        finally:
            self._metrics.seconds.labels(operation).observe(time.perf_counter() - began)

    def _count(self, operation: str, data: BatchData | Draft | None) -> None:
        if isinstance(data, Draft):
            sizes = {column.name: sum(size for _, size in column.buffers) for column in data.header.columns}
        else:
            sizes = {name: column.nbytes for name, column in data.columns.items()} if data is not None else {}
        for name, nbytes in sizes.items():
            self._metrics.bytes.labels(operation, name).inc(nbytes)
