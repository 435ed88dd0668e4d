"""Messages between clients, controller and storage units: msgpack, one message per frame.

* A request MUST be a `Request`, an answer a `Reply` with the request's id. A server answers a
  request at most once.
* A reader MUST refuse unknown types, unknown fields and frames above `MAX_FRAME` bytes.
* Numbers in `bytes` fields are little-endian arrays of the type named there.
* Nothing in a message is unpickled, executed or resolved by name, except names of errors in the
  closed table `failures.ERRORS`.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

from rl_protocol.errors import BatchError
from rl_transferqueue.wire.descriptor import PlaneDescriptor, UnitAddress
from rl_transferqueue.wire.process_liveness import ProcessId
from rl_transferqueue.wire.spans import BlockRef, Count, Span

MAX_FRAME = 64 << 20
CONTROLLER = b"controller"
"""Identity of the controller at its storage units."""
NOTICE = 0
"""Id of a reply without a request: a notice, or the error of a request whose id can't be read."""

Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
Value: TypeAlias = bool | int | float | str | None
TagMessage: TypeAlias = dict[str, Value]


class _Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    pass


class TagColumn(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One tag of several rows."""

    name: str
    values: tuple[Value, ...]
    rows: bytes = b""
    """int32 [V], ascending: the rows that have the tag, where not every row has it."""


# -- client -> controller


class Hello(_Message, frozen=True):
    """First message of a session. The session ends with its process or with `Bye`."""

    process: ProcessId | None
    """None: the client maps no memory of the plane."""
    host: str = ""
    """`this_host` of the client: its puts go to units there, if there are any. The session of a
    client on another host than the controller, or without a process, ends with its bulk connection
    to the controller."""


class Resume(_Message, frozen=True):
    """First message to the successor of a controller that has ended; the session continues."""

    incarnation: Count
    """That of the successor. A controller with another one refuses."""
    process: ProcessId | None
    """As those of `Hello`."""
    host: str
    unanswered: tuple[Count, ...]
    """Requests whose answers did not come or were not waited for: rows that they took are given
    back."""


class FindController(_Message, frozen=True):
    """Ask at the address of a controller, without a session, which one serves the plane now: a
    successor has the same address."""


class Bye(_Message, frozen=True):
    """Ends the session. Its leases stay until they are released or the process ends."""


class JoinUnits(_Message, frozen=True):
    """Add running storage units of another host to the plane, with the numbers that follow."""

    units: tuple[UnitAddress, ...]


class Reserve(_Message, frozen=True):
    """Reserve memory for blocks that this session will commit."""

    nbytes: Count
    timeout_s: Seconds


class Abandon(_Message, frozen=True):
    """Give back reserved memory; committed blocks stay. Sent without waiting for the answer."""

    spans: tuple[Span, ...]
    late: bool = False
    """Bytes that were written to the spans may not have reached the unit yet."""


class Commit(_Message, frozen=True):
    """Add rows, tags and the columns of a written block, all or nothing.

    The controller then owns the block.
    """

    partition: str
    keys: tuple[str, ...]
    tags: tuple[TagColumn, ...] = ()
    expect: tuple[TagMessage | None, ...] | None = None
    """[N], as `expect` of `rl_protocol.ports.DataPlane.put`."""
    block: Span | None = None
    """Part of what the session has reserved."""
    header: bytes = b""
    """msgpack of rl_protocol.wire.Header; only with a block."""
    spare: Count = 0
    """Bytes to reserve for the session's next puts, if memory is plentiful."""


class Recall(_Message, frozen=True):
    """Ask whether an earlier `Commit` of this session was made; answered once that is certain."""

    request: Count


class Locate(_Message, frozen=True):
    """Find the columns of rows; their blocks do not change until `lease` is released."""

    lease: Count
    partition: str
    keys: tuple[str, ...]
    fields: tuple[str, ...]
    timeout_s: Seconds
    """For rows that the journal alone has: how long they may wait for memory."""
    generations: bytes = b""
    """int64 [N] generations the rows must have, 0: any; empty: any for all rows."""


class FindHosts(_Message, frozen=True):
    """Ask on which hosts the columns of rows are."""

    partition: str
    keys: tuple[str, ...]


class ReleaseLeases(_Message, frozen=True):
    """End leases. Sent without waiting for the answer."""

    leases: tuple[Count, ...]


class WaitReady(_Message, frozen=True):
    partition: str
    count: Count
    fields: tuple[str, ...]
    where: TagMessage
    task: str | None
    timeout_s: Seconds


class ListRows(_Message, frozen=True):
    partition: str
    where: TagMessage
    fields: tuple[str, ...] = ()
    task: str | None = None
    keys: tuple[str, ...] | None = None


class Watch(_Message, frozen=True):
    partition: str
    since: Count
    where: TagMessage
    timeout_s: Seconds


class Claim(_Message, frozen=True):
    """Mark the rows as consumed, all or none."""

    partition: str
    keys: tuple[str, ...]
    task: str


class GetConsumption(_Message, frozen=True):
    partition: str
    task: str


class GetProduction(_Message, frozen=True):
    partition: str
    fields: tuple[str, ...]


class ResetConsumption(_Message, frozen=True):
    partition: str
    task: str | None
    keys: tuple[str, ...] | None


class Clear(_Message, frozen=True):
    partition: str
    keys: tuple[str, ...] | None


class Unload(_Message, frozen=True):
    """Rows that the journal has leave memory, until they are read."""

    partition: str
    keys: tuple[str, ...]


class GetStats(_Message, frozen=True):
    pass


class GetMetrics(_Message, frozen=True):
    """Ask for the controller's counters since its start."""


class Cancel(_Message, frozen=True):
    """The caller does not wait for the answer of `request` any more.

    Rows and memory that the request took are given back; what it wrote or cleared stays. Sent
    without waiting for an answer.
    """

    request: Count


# -- controller -> unit


class Fence(_Message, frozen=True):
    """Wait until no bytes of a session can arrive in these spans any more; a backend frees their
    blocks."""

    session: bytes
    spans: tuple[Span, ...]
    ended: bool
    """The session has ended and writes nothing more."""
    serial: Count
    """Spans that the session has abandoned late so far, these included."""


class AwaitEnd(_Message, frozen=True):
    """Answer once this process of the unit's host has ended: it writes to the arena no more, and
    reads nothing."""

    process: ProcessId


class Free(_Message, frozen=True):
    """Remove the blocks at the beginning of these spans from a backend's store."""

    spans: tuple[Span, ...]


class DescribeMemory(_Message, frozen=True):
    """Ask where the unit's arena is."""

    incarnation: Count
    """Of the controller. For a later one than before the unit replaces its arena by a new one,
    since processes may still use the old one; an earlier one is refused."""


class HangUp(_Message, frozen=True):
    """The plane has no controller any more: end the connections of clients of other hosts, and let
    none in. Sent without waiting for the answer."""


class Populate(_Message, frozen=True):
    """Touch the memory up to this offset. Sent without waiting for the answer."""

    stop: Count


class Measure(_Message, frozen=True):
    """Compute the header of a block with only columns `fields` of rows `rows` of the source
    block."""

    source: Span
    header: bytes
    rows: bytes
    """int64, ascending."""
    fields: tuple[str, ...]


class ComputeDigest(_Message, frozen=True):
    """Compute the xxh3-128 of the first `nbytes` bytes of a block."""

    block: Span
    nbytes: Count


class Copy(_Message, frozen=True):
    """Copy columns `fields` of rows `rows` of a block to `target`, laid out as measured."""

    source: Span
    header: bytes
    rows: bytes
    """int64, ascending."""
    fields: tuple[str, ...]
    target: Span


# -- answers


class Done(_Message, frozen=True):
    pass


class Failure(_Message, frozen=True):
    error: str
    message: str


class Resumed(_Message, frozen=True):
    """Answer to `Resume`."""

    made: tuple[tuple[Count, bytes], ...]
    """Those of the unanswered requests that are puts and were made, with generations as in
    `Committed`."""


class FoundController(_Message, frozen=True):
    """Answer to `FindController`."""

    incarnation: Count
    """Of the controller that answers."""
    plane: PlaneDescriptor
    """The last descriptor; while the controller starts, it names an earlier one."""


class Reserved(_Message, frozen=True):
    span: Span


class Committed(_Message, frozen=True):
    generations: bytes
    """Generation numbers of the rows, as `arrays.pack_ints` packs them."""
    spare: Span | None = None


class Recalled(_Message, frozen=True):
    made: bool
    """False: it was not, and will not be."""
    generations: bytes = b""
    """As those of `Committed`."""


class Located(_Message, frozen=True):
    """Column c of row i is in block `blocks[places[place_of[c]][0][i]]`, row
    `places[place_of[c]][1][i]` of it."""

    blocks: tuple[BlockRef, ...]
    epochs: bytes
    """int64 per block: the places are valid while the block has this epoch."""
    headers: tuple[bytes, ...]
    """The distinct headers of the blocks."""
    header_of: tuple[Count, ...]
    """Per block, the index of its header in `headers`."""
    places: tuple[tuple[bytes, bytes], ...]
    """int32 [N] and int32 [N]."""
    place_of: tuple[Count, ...]
    """Per column asked for."""


class Rows(_Message, frozen=True):
    keys: tuple[str, ...]
    tags: tuple[TagColumn, ...]
    fields: tuple[str, ...]
    generations: bytes
    """Generation numbers, as `arrays.pack_ints` packs them; a row that is cleared and written again
    has another one."""


class Changes(_Message, frozen=True):
    rows: Rows
    removed: tuple[str, ...]
    version: Count
    reset: bool


class HostBytes(_Message, frozen=True):
    hosts: tuple[str, ...]
    """[H] `this_host` of each host that has storage units."""
    nbytes: bytes
    """int64 [N, H] payload bytes of the rows asked for."""


class Flags(_Message, frozen=True):
    keys: tuple[str, ...]
    flags: bytes
    """bool [N] or [N, F]."""


class Cleared(_Message, frozen=True):
    count: Count


class LinkBytes(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Payload bytes of puts and gets by the link they took."""

    shared_memory: Count = 0
    """Between processes of one host, in memory that both map."""
    loopback: Count = 0
    """Through the network interface of one host."""
    network: Count = 0
    """Between hosts."""

    def __add__(self, other: LinkBytes) -> LinkBytes:
        return LinkBytes(
            self.shared_memory + other.shared_memory, self.loopback + other.loopback, self.network + other.network
        )


class Stats(_Message, frozen=True):
    rows: dict[str, Count]
    bytes_used: Count
    bytes_reserved: Count
    bytes_capacity: Count
    lost: dict[str, tuple[str, ...]]
    columns: dict[str, tuple[str, ...]]
    tasks: dict[str, tuple[str, ...]]
    links: LinkBytes
    """Bytes that all clients have moved, as they have said with their requests."""
    damaged: Count
    """Blocks that were damaged in memory; their rows were read again from the journal."""
    evicted: Count
    """Blocks that left memory for others; the journal has their rows."""


class OperationCount(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Requests of one type, and the server's time for them without waiting for rows or memory."""

    requests: Count
    nanoseconds: Count
    longest_nanoseconds: Count
    bytes_received: Count


class ColumnCount(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Rows and bytes of one column that were put, and rows that were located for readers."""

    rows_written: Count
    bytes_written: Count
    rows_located: Count


class Metrics(_Message, frozen=True):
    operations: dict[str, OperationCount]
    """By message type."""
    errors: dict[str, Count]
    """Requests answered with an error, by its class."""
    columns: dict[str, ColumnCount]
    bytes_sent: Count
    sessions: Count
    """Clients that are connected."""
    waiting: Count
    """Requests that wait for rows or memory."""
    waiting_puts: Count
    """Those of them that wait for memory."""
    waiting_bytes: Count
    """The memory that they wait for."""


class Measured(_Message, frozen=True):
    header: bytes
    payload: Count
    """Bytes the copy needs."""


class Digest(_Message, frozen=True):
    digest: bytes


class ArenaMemory(_Message, frozen=True):
    """What `rl_transferqueue.memory.arena.map_memory` needs."""

    process: ProcessId
    fd: Count
    nbytes: Count


# -- notices, controller -> client


class Revoked(_Message, frozen=True):
    """These blocks are held by leases of the session, and have no rows any more, or others wait for
    memory: drop cached locations."""

    blocks: tuple[Count, ...]


class Reclaim(_Message, frozen=True):
    """A put waits for memory: abandon memory that is reserved ahead of need."""


ControllerRequest: TypeAlias = (
    Hello
    | Resume
    | FindController
    | Bye
    | JoinUnits
    | Reserve
    | Abandon
    | Commit
    | Recall
    | Locate
    | FindHosts
    | ReleaseLeases
    | WaitReady
    | ListRows
    | Watch
    | Claim
    | GetConsumption
    | GetProduction
    | ResetConsumption
    | Clear
    | Unload
    | GetStats
    | GetMetrics
    | Cancel
)
UnitRequest: TypeAlias = Fence | AwaitEnd | Free | Populate | DescribeMemory | HangUp | Measure | ComputeDigest | Copy
AnyRequest: TypeAlias = ControllerRequest | UnitRequest
Notice: TypeAlias = Revoked | Reclaim
Answer: TypeAlias = (
    Done
    | Failure
    | Resumed
    | FoundController
    | Reserved
    | Committed
    | Recalled
    | Located
    | Rows
    | Changes
    | HostBytes
    | Flags
    | Cleared
    | Stats
    | Metrics
    | Measured
    | Digest
    | ArenaMemory
    | Notice
)


class Request(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One call: `id` is unique within its session."""

    id: Count
    body: AnyRequest
    received: tuple[Count, ...] = ()
    """Earlier requests whose answers have arrived: what they took is not given back."""
    moved: LinkBytes | None = None
    """What the session has moved since its request before; None: nothing."""


class Reply(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The answer to the request with that id, or a `Notice` with the id `NOTICE`."""

    id: Count
    body: Answer


_encoder = msgspec.msgpack.Encoder()


def pack(message: Request | Reply) -> bytes:
    """One frame.

    Raises:
        BatchError: the message can't be encoded as msgpack, or is longer than a frame may be.
    """
    try:
        frame = _encoder.encode(message)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise BatchError(
            f"Partitions, keys, fields and tags must be strings that UTF-8 can encode, numbers, booleans or None of at most 64 bits: {error}."
        ) from error
    if len(frame) > MAX_FRAME:
        raise BatchError(
            f"A control message takes {len(frame)} bytes, the limit is {MAX_FRAME}; use fewer rows per call."
        )
    return frame
