"""Operations of an endpoint, and handles that call them in another process.

An operation is an async method of an Endpoint class with the decorator `operation`. Its signature
is its only declaration: the types of the request and of the answer are derived from it. Both travel
as msgpack, through any function that carries a method's name and bytes to a process:

    manager -> remote(ReceiverEndpoint, worker).activate(3, 60.0)
            -> worker.call("weights.activate", request, timeout_s=65.0)
            -> endpoint.handle("activate", request)                         in the other process
            -> endpoint.activate(3, 60.0)
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, ClassVar, Generic, Protocol, TypeVar, cast, get_type_hints

import msgspec

from rl_protocol.errors import UNREADABLE, WorkerError

METHODS = "weights."
"""Prefix of the operations among the methods of a worker."""
MARGIN_S = 5.0
"""Added to the deadline of a call, so that the endpoint's own deadline passes first.

Its message has more details."""
_DEFAULT_S = 60.0
"""Deadline of operations without the argument `timeout_s`, which only compute."""

T = TypeVar("T")
E = TypeVar("E", bound="Endpoint")
M = TypeVar("M", bound=Callable[..., Awaitable[Any]])


class Operation(Generic[T]):
    """The declaration of one operation.

    Attributes:
        name: name of the method.
        request: struct of its arguments, in their order; unknown fields are refused.
        answer: type of its result.
    """

    def __init__(self, method: Callable[..., Awaitable[T]]) -> None:
        self.name = method.__name__
        hints = get_type_hints(method)
        self.answer: Any = hints.pop("return")
        arguments = list(inspect.signature(method).parameters)[1:]
        self.request = msgspec.defstruct(
            f"{self.name}_request", [(name, hints[name]) for name in arguments], forbid_unknown_fields=True, frozen=True
        )


def operation(method: M) -> M:
    """Declare an async method of an Endpoint class as an operation.

    Arguments and result must be types that msgspec encodes.
    """
    vars(method)["operation"] = Operation(method)
    return method


class Endpoint:
    """Base of the endpoints. `operations` maps each operation's name to its declaration."""

    operations: ClassVar[Mapping[str, Operation[Any]]] = {}

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        own = {name: declared for name, method in vars(cls).items() if (declared := _declared(method)) is not None}
        cls.operations = {**cls.operations, **own}

    async def handle(self, method: str, payload: bytes) -> bytes:
        """Decode a request, run the operation, and encode its answer.

        Raises:
            WorkerError: this endpoint has no such operation, or the request does not fit it.
            RLError: raised by the operation.
        """
        declared = self.operations.get(method)
        if declared is None:
            raise WorkerError(
                f"{type(self).__name__} has no operation {method!r}; it has {', '.join(self.operations)}."
            )
        try:
            request = msgspec.msgpack.decode(payload, type=declared.request)
        except UNREADABLE as error:
            raise WorkerError(f"{type(self).__name__}.{method} was sent an unreadable request: {error}.") from error
        run: Callable[..., Awaitable[Any]] = getattr(self, method)
        return msgspec.msgpack.encode(await run(*msgspec.structs.astuple(request)))


class Caller(Protocol):
    """Carries calls to one other process."""

    @property
    def name(self) -> str:
        """Name of the process; unique among the replicas."""
        ...

    async def call(self, method: str, payload: bytes, *, timeout_s: float) -> bytes:
        """Pass `payload` to the process and return its answer; `method` begins with METHODS.

        MUST raise only RLError, TimeoutError or OSError: translate the errors of your remote-call
        library.
        """
        ...


def remote(endpoint: type[E], worker: Caller) -> E:
    """A handle with the operations of `endpoint`, which is in the process of `worker`.

    It has the operations and `name`, and nothing else.
    """
    calls = {declared.name: _forwarder(declared) for declared in endpoint.operations.values()}
    return cast("E", type(f"Remote{endpoint.__name__}", (_Remote,), calls)(worker))


class _Remote:
    def __init__(self, worker: Caller) -> None:
        self.worker = worker

    @property
    def name(self) -> str:
        return self.worker.name


def _forwarder(declared: Operation[T]) -> Callable[..., Awaitable[T]]:
    method = METHODS + declared.name
    encoder, decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(declared.answer)

    async def forward(self: _Remote, *args: Any, **kwargs: Any) -> T:
        request = declared.request(*args, **kwargs)
        timeout_s = getattr(request, "timeout_s", _DEFAULT_S) + MARGIN_S
        return decoder.decode(await self.worker.call(method, encoder.encode(request), timeout_s=timeout_s))

    return forward


def _declared(method: object) -> Operation[Any] | None:
    return getattr(method, "operation", None)
