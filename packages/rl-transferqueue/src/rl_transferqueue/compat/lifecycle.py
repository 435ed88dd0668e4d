"""`init`, `close` and `get_client` of TransferQueue 0.1.11: this process's plane and client.

The first process that calls `init` starts a plane on this host and announces it in two ways: in the
environment variable RL_TRANSFERQUEUE_PLANE (JSON), which its child processes inherit, and, if Ray
is initialized, by a named Ray actor. Other processes attach when they call `init` or their first
operation. The plane ends with `close` in the process that started it, or with that process.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import msgspec

from rl_protocol.errors import UNREADABLE, ConfigError, PlaneLostError, WireError
from rl_transferqueue.client.deadline import deadline_after, seconds_until
from rl_transferqueue.compat import ray_discovery
from rl_transferqueue.compat.client import TransferQueueClient
from rl_transferqueue.compat.errors import NotInitializedError
from rl_transferqueue.compat.sampler import (
    BaseSampler,
    GRPOGroupNSampler,
    RankAwareSampler,
    SeqlenBalancedSampler,
    SequentialSampler,
)
from rl_transferqueue.compat.session import Settings
from rl_transferqueue.config import TransferQueueConfig
from rl_transferqueue.launch.local_plane import start_local_plane
from rl_transferqueue.wire.descriptor import PlaneDescriptor

if TYPE_CHECKING:
    from rl_transferqueue.observe.prometheus import MetricsServer

logger = logging.getLogger(__name__)

PLANE_VARIABLE = "RL_TRANSFERQUEUE_PLANE"
_ATTACH_S = 60.0
"""Seconds to find and join the plane in a process that did not call `init`."""
_SAMPLERS = {
    kind.__name__: kind for kind in (SequentialSampler, GRPOGroupNSampler, RankAwareSampler, SeqlenBalancedSampler)
}
_SAMPLER_SIZES = ("n_samples_per_prompt", "dp_size")
_DEFAULTS: Mapping[str, Any] = {
    "metrics": {"enabled": False, "port": 0},
    "controller": {"sampler": "SequentialSampler", "polling_mode": False, "fetch_timeout_s": 5.0, "zmq_info": None},
    "backend": {
        "storage_backend": "SimpleStorage",
        "SimpleStorage": {"total_storage_size": None, "num_data_storage_units": 2},
    },
    "rl_transferqueue": {"capacity_mb": 1024},
}


class Announcement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What other processes need to attach to a plane."""

    descriptor: PlaneDescriptor
    sampler: str
    """Class of the sampler; "" for a user's class, which each process passes to its own `init`."""
    sizes: dict[str, int]
    polling_mode: bool
    fetch_timeout_s: float
    metrics: str
    """host:port of the Prometheus endpoint; "" if there is none."""
    storage_units: int
    own: dict[str, Any]
    """The section rl_transferqueue."""


class Conf(dict[str, Any]):
    """A configuration with access by attribute and by item."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"No setting {name!r}; there are {', '.join(self)}.") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


class _Process:
    """The plane and client of this process. A forked child starts empty and attaches itself."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        """A fork has its own, as it could find that of its parent taken for ever."""
        self.client: TransferQueueClient | None = None
        self.plane: contextlib.ExitStack | None = None
        """Closes the plane that this process started."""
        self.notice: ray_discovery.Notice | None = None
        self.metrics_endpoint = ""
        self.sampler: BaseSampler | None = None
        self.attached: Mapping[str, Any] = {}
        """Settings of a plane that another process started."""


_processes: dict[int, _Process] = {}


def _here() -> _Process:
    return _processes.setdefault(os.getpid(), _Process())


def init(conf: Any = None) -> Conf:
    """Attach to the running plane, or start one.

    Args:
        conf: a mapping (or an OmegaConf) that overrides the defaults, as in 0.1.11. Used are
            `controller.sampler` (a name, class or instance), `controller.polling_mode`,
            `controller.fetch_timeout_s`, `backend.SimpleStorage.num_data_storage_units`,
            `metrics.enabled` and `metrics.port` (on 127.0.0.1; needs the extra `[metrics]`), and
            the fields of TransferQueueConfig under `rl_transferqueue`. `total_storage_size` (rows)
            is ignored: `rl_transferqueue.capacity_mb` limits bytes. `rl_transferqueue.timeout_s`
            limits this call too.

    Returns:
        All settings; those of the running plane where it was started by another process.
        `controller.zmq_info` is the descriptor as JSON, for TransferQueueClient and
        StreamingDataset; `metrics.endpoint` is what `get_metrics_endpoint` returns.

    Raises:
        ConfigError: a setting is not supported.
        PlaneTimeout: the running plane, or the actor that announces it, did not answer in time.
        PlaneLostError: no plane could be started in time.
    """
    merged = _merge(_DEFAULTS, conf if conf is not None else {})
    deadline = deadline_after(_plane_config(merged).timeout_s)
    here = _here()
    with here.lock:
        _drop_dead(here, deadline)
        here.sampler = _own_sampler(merged) or here.sampler
        if here.client is None and not _attach(here, deadline):
            _start(here, merged, deadline)
        assert here.client is not None
        return _told(_merge(merged, here.attached), here.client.descriptor, here.metrics_endpoint)


def _told(conf: Conf, descriptor: PlaneDescriptor, endpoint: str) -> Conf:
    """The settings, completed with the plane's descriptor and metrics endpoint."""
    conf["controller"]["zmq_info"] = descriptor.to_json()
    conf["metrics"]["endpoint"] = endpoint or None
    return conf


def get_client() -> TransferQueueClient:
    """The client of this process; attaches to a running plane first.

    Raises:
        NotInitializedError: this process finds no plane.
    """
    here = _here()
    if here.client is None:
        with here.lock:
            if here.client is None and not _attach(here, deadline_after(_ATTACH_S)):
                raise NotInitializedError(
                    f"There is no plane: call init() first. A process that is not a child of the one that called init() "
                    f"needs the same value of {PLANE_VARIABLE}, or Ray."
                )
    assert here.client is not None
    return here.client


def get_metrics_endpoint() -> str | None:
    """host:port of the plane's Prometheus endpoint; None without a plane or `metrics.enabled`."""
    here = _here()
    with here.lock:
        if here.client is None:
            _attach(here, deadline_after(_ATTACH_S))
    return here.metrics_endpoint or None


def close() -> None:
    """Close this process's client. Safe to call twice.

    In the process that started the plane it ends the plane, and its data is lost.
    """
    here = _here()
    with here.lock:
        client, plane, notice = here.client, here.plane, here.notice
        here.client = here.plane = here.notice = here.sampler = None
        here.metrics_endpoint, here.attached = "", {}
        if client is not None:
            client.close()
        if plane is not None:
            os.environ.pop(PLANE_VARIABLE, None)
            plane.close()
        if notice is not None:
            notice.withdraw()


def settings_of(conf: Any) -> Settings:
    """How rows are fetched, by a configuration that `init` was given or returned."""
    merged = _merge(_DEFAULTS, conf)
    return Settings(
        sampler=_own_sampler(merged) or _named_sampler(merged),
        polling_mode=bool(merged.controller.polling_mode),
        fetch_timeout_s=float(merged.controller.fetch_timeout_s),
    )


def _attach(here: _Process, deadline: float) -> bool:
    """Connect to an announced plane; False if none is running."""
    inherited = os.environ.get(PLANE_VARIABLE, "")
    if inherited and _connect(here, inherited, deadline):
        return True
    found = ray_discovery.find(seconds_until(deadline))
    return bool(found) and _connect(here, found, deadline)


def _connect(here: _Process, text: str, deadline: float) -> bool:
    try:
        told = msgspec.json.decode(text, type=Announcement)
    except UNREADABLE as error:
        raise WireError(f"{PLANE_VARIABLE} does not describe a plane: {error}.") from error
    sampler = here.sampler
    if sampler is None and told.sampler:
        sampler = _SAMPLERS[told.sampler](**told.sizes)
    settings = Settings(polling_mode=told.polling_mode, fetch_timeout_s=told.fetch_timeout_s)
    if sampler is not None:
        settings.sampler = sampler
    try:
        here.client = _client(told.descriptor, settings, deadline)
    except PlaneLostError:
        logger.info("An announced plane is gone: %s", told.descriptor.controller.address)
        return False
    here.metrics_endpoint = told.metrics
    here.attached = {
        "controller": vars(settings),
        "backend": {"SimpleStorage": {"num_data_storage_units": told.storage_units}},
        "rl_transferqueue": told.own,
    }
    return True


def _drop_dead(here: _Process, deadline: float) -> None:
    """Close a client whose plane has ended."""
    if here.client is None:
        return
    try:
        here.client.portal.run(here.client.session.plane.stats(timeout_s=seconds_until(deadline)))
    except PlaneLostError:
        close()


def _start(here: _Process, conf: Conf, deadline: float) -> None:
    settings = settings_of(conf)
    kind = type(settings.sampler).__name__
    known = kind if _SAMPLERS.get(kind) is type(settings.sampler) else ""
    sizes = {name: value for name, value in vars(settings.sampler).items() if known and name in _SAMPLER_SIZES}
    with contextlib.ExitStack() as undo:
        plane = undo.enter_context(start_local_plane(_plane_config(conf), start_timeout_s=seconds_until(deadline)))
        endpoint = ""
        if conf.metrics.enabled:
            metrics = undo.enter_context(_serve_metrics(plane.descriptor, conf.metrics.port))
            endpoint = metrics.endpoint
        told = Announcement(
            plane.descriptor,
            known,
            sizes,
            settings.polling_mode,
            settings.fetch_timeout_s,
            metrics=endpoint,
            storage_units=conf.backend.SimpleStorage.num_data_storage_units,
            own=conf["rl_transferqueue"],
        )
        text = msgspec.json.encode(told).decode()
        here.notice = ray_discovery.announce(text, _told(conf, plane.descriptor, endpoint), seconds_until(deadline))
        if here.notice is not None:
            here.plane = undo.pop_all()
    if here.notice is None:  # another process was faster
        if not _attach(here, deadline):
            raise NotInitializedError(
                "Another process announced a plane at the same time, and that plane has ended; call init() again."
            )
        return
    os.environ[PLANE_VARIABLE] = text
    here.metrics_endpoint = endpoint
    here.client = _client(plane.descriptor, settings, deadline)


def _serve_metrics(descriptor: PlaneDescriptor, port: int) -> MetricsServer:
    try:
        from rl_transferqueue.observe.prometheus import serve_metrics
    except ModuleNotFoundError as error:
        raise ConfigError(f"metrics.enabled needs an extra: {error}.") from error
    return serve_metrics(descriptor, port=port)


def _client(descriptor: PlaneDescriptor, settings: Settings, deadline: float) -> TransferQueueClient:
    name = f"TransferQueueClient_{os.getpid()}"
    return TransferQueueClient(name, descriptor, settings=settings, timeout_s=seconds_until(deadline))


def _plane_config(conf: Conf) -> TransferQueueConfig:
    if conf.backend.storage_backend != "SimpleStorage":
        raise ConfigError(f"backend.storage_backend must be SimpleStorage; got {conf.backend.storage_backend!r}.")
    if conf.backend.SimpleStorage.get("ssd_offload", {}).get("enabled"):
        raise ConfigError("backend.SimpleStorage.ssd_offload.enabled must be false; rows are kept in memory here.")
    units = conf.backend.SimpleStorage.num_data_storage_units
    # Callers write to the tensors of this API, so gets share none.
    own: Mapping[str, Any] = {"num_storage_units": units, "read_cache_mb": 0} | conf["rl_transferqueue"]
    try:
        return TransferQueueConfig(**own)
    except TypeError as error:
        raise ConfigError(f"The section rl_transferqueue has an unknown setting: {error}.") from error


def _own_sampler(conf: Conf) -> BaseSampler | None:
    """A sampler given as an instance or a class; None if it is a name."""
    given = conf.controller.sampler
    if isinstance(given, type) and issubclass(given, BaseSampler):
        return given()
    return given if isinstance(given, BaseSampler) else None


def _named_sampler(conf: Conf) -> BaseSampler:
    name = conf.controller.sampler
    if name not in _SAMPLERS:
        raise ConfigError(f"controller.sampler must be a BaseSampler or one of {', '.join(_SAMPLERS)}; got {name!r}.")
    return _SAMPLERS[name]()


def _merge(defaults: Mapping[str, Any], given: Mapping[str, Any]) -> Conf:
    merged = Conf({name: _merge(v, {}) if isinstance(v, Mapping) else v for name, v in defaults.items()})
    for name in given:
        value = given[name]
        if hasattr(value, "keys"):
            base = merged.get(name)
            merged[name] = _merge(cast("Mapping[str, Any]", base) if isinstance(base, Mapping) else {}, value)
        else:
            merged[name] = value
    return merged
