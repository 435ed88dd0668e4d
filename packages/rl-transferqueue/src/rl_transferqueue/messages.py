"""What clients, controller and storage units say to each other: msgpack of the closed types below, one per ZeroMQ frame.

* A request MUST be a `Request`, an answer a `Reply` with the request's id. A server answers a request at most once.
* A reader MUST refuse unknown types, unknown fields and frames above `MAX_FRAME` bytes.
* Numbers in `bytes` fields are little-endian arrays of the type named there.
* There is no pickle and nothing in a message is executed or resolved by name, except error names in the closed table `ERRORS`.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

from rl_protocol import errors
from rl_protocol.errors import BatchError, DataPlaneError, RLError
from rl_transferqueue.liveness import ProcessId

MAX_FRAME = 64 << 20
CONTROLLER = b"controller"
"""ZeroMQ identity of the controller at its storage units."""
BLOCK_BITS = 48
"""A block id is the number of its unit times 2^48 plus a number that the unit counts up from 1."""

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=(1 << 62))]
Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
TagMessage: TypeAlias = dict[str, bool | int | float | str | None]


class _Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    pass


class BlockRef(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One block of one unit's arena. Ids are never used twice, so a stale reference can't meet other data."""

    id: Count
    unit: Count
    offset: Count
    nbytes: Count


# ---------------------------------------------------------------------------------------------------- client -> controller


class Hello(_Message, frozen=True):
    """First message of a session; a session is a ZeroMQ identity and ends with its process or with `Bye`."""

    process: ProcessId | None
    """None: on another host; the session ends with the bulk connection to the controller that was opened under its identity."""


class Bye(_Message, frozen=True):
    """Ends the session. Its leases stay until they are released or the process ends."""


class Commit(_Message, frozen=True):
    """Make rows, tags and the columns of a written block visible, all or nothing. From here on the block is the controller's."""

    put_id: Count
    """Chosen by the client; a repeated commit with the same id changes nothing."""
    partition: str
    keys: tuple[str, ...]
    tags: tuple[TagMessage, ...] | None = None
    block: BlockRef | None = None
    header: bytes = b""
    """msgpack of rl_protocol.wire.Header; only with a block."""


class Locate(_Message, frozen=True):
    """Where the columns of the rows are; the blocks stay as they are until `lease` is released."""

    lease: Count
    partition: str
    keys: tuple[str, ...]
    fields: tuple[str, ...]


class ReleaseLeases(_Message, frozen=True):
    """Sent without waiting for the answer."""

    leases: tuple[Count, ...]


class WaitReady(_Message, frozen=True):
    partition: str
    count: Count
    fields: tuple[str, ...]
    where: TagMessage
    task: str | None
    timeout_s: Seconds


class GiveBack(_Message, frozen=True):
    """Rows handed out for a task to a caller that had left: they are no longer consumed."""

    partition: str
    task: str
    uids: bytes
    """int64 [N]."""


class ListRows(_Message, frozen=True):
    partition: str
    where: TagMessage


class Clear(_Message, frozen=True):
    partition: str
    keys: tuple[str, ...] | None


class GetStats(_Message, frozen=True):
    pass


# ------------------------------------------------------------------------------------------------------- client -> server


class Cancel(_Message, frozen=True):
    """The caller has left request `request`: forget it if it waits; a unit also takes back the block it gave for it.

    The answer to this comes after any answer to that request.
    """

    request: Count


# ---------------------------------------------------------------------------------------------------------- client -> unit


class Allocate(_Message, frozen=True):
    nbytes: Count
    timeout_s: Seconds


# ------------------------------------------------------------------------------------------------------ controller -> unit


class Release(_Message, frozen=True):
    blocks: tuple[Count, ...]


class EndSession(_Message, frozen=True):
    """A client is gone: give it nothing more, and say which blocks it was given."""

    session: bytes


class Compact(_Message, frozen=True):
    """Copy columns `fields` of rows `rows` of a block to a new block."""

    block: Count
    header: bytes
    rows: bytes
    """int64, ascending."""
    fields: tuple[str, ...]


class GetUnitStats(_Message, frozen=True):
    pass


# ----------------------------------------------------------------------------------------------------------------- answers


class Done(_Message, frozen=True):
    pass


class Failure(_Message, frozen=True):
    error: str
    message: str


class Located(_Message, frozen=True):
    """Column c of row i is in block `blocks[places[place_of[c]][0][i]]`, row `places[place_of[c]][1][i]` of it."""

    blocks: tuple[BlockRef, ...]
    headers: tuple[bytes, ...]
    """The different headers there are."""
    header_of: tuple[Count, ...]
    """Per block, which header it has."""
    places: tuple[tuple[bytes, bytes], ...]
    """int32 [N] and int32 [N]."""
    place_of: tuple[Count, ...]
    """Per column asked for."""


class Rows(_Message, frozen=True):
    keys: tuple[str, ...]
    tags: tuple[TagMessage, ...]
    fields: tuple[str, ...]
    uids: bytes
    """int64 [N]: generation numbers; a row that was cleared and made anew has another one."""


class Cleared(_Message, frozen=True):
    count: Count


class Stats(_Message, frozen=True):
    rows: dict[str, Count]
    bytes_used: Count
    bytes_capacity: Count


class Allocated(_Message, frozen=True):
    block: BlockRef


class SessionBlocks(_Message, frozen=True):
    session: bytes
    blocks: tuple[Count, ...]


class Compacted(_Message, frozen=True):
    block: BlockRef | None
    """None: no room now, or no gain."""
    header: bytes
    no_gain: bool = False
    """The copy would not be smaller."""


class UnitStats(_Message, frozen=True):
    bytes_used: Count
    bytes_capacity: Count


ControllerRequest: TypeAlias = (
    Hello | Bye | Commit | Locate | ReleaseLeases | WaitReady | GiveBack | ListRows | Clear | GetStats | Cancel
)
UnitRequest: TypeAlias = Allocate | Cancel | Release | EndSession | Compact | GetUnitStats
AnyRequest: TypeAlias = ControllerRequest | UnitRequest
Answer: TypeAlias = (
    Done | Failure | Located | Rows | Cleared | Stats | Allocated | SessionBlocks | Compacted | UnitStats
)


class Request(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One call: `id` is unique within its session."""

    id: Count
    body: AnyRequest


class Reply(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The answer to the request with that id; id 0 answers a request whose id could not be read."""

    id: Count
    body: Answer


ERRORS: dict[str, type[RLError]] = {
    cls.__name__: cls
    for cls in (
        errors.BatchError,
        errors.CapacityTimeout,
        errors.DataPlaneError,
        errors.DuplicateKeyError,
        errors.MissingDataError,
        errors.PlaneLostError,
        errors.PlaneTimeout,
        errors.WireError,
    )
}
"""The errors that cross the wire, by name."""

_encoder = msgspec.msgpack.Encoder()


def failure(error: RLError) -> Failure:
    """An error as an answer."""
    name = type(error).__name__
    return Failure(name if name in ERRORS else DataPlaneError.__name__, error.message)


def error_of(answer: Failure) -> RLError:
    """The error to raise at the caller."""
    return ERRORS.get(answer.error, DataPlaneError)(answer.message)


def pack(message: Request | Reply) -> bytes:
    """One frame.

    Raises:
        BatchError: the message can't be said in msgpack, or is longer than a frame may be.
    """
    try:
        frame = _encoder.encode(message)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise BatchError(
            f"Keys, fields and tags must be strings, numbers, booleans or None of at most 64 bits: {error}."
        ) from error
    if len(frame) > MAX_FRAME:
        raise BatchError(
            f"A control message takes {len(frame)} bytes, the limit is {MAX_FRAME}; use fewer rows per call."
        )
    return frame
