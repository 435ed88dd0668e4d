"""The answers to the last puts of one session, for a client that did not get one. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from rl_protocol.errors import DataPlaneError
from rl_transferqueue.journal.kept_answers import KEPT
from rl_transferqueue.wire.messages import Recalled


class PutAnswers:
    """What a `Recall` finds out.

    >>> answers = PutAnswers()
    >>> answers.end(3, b"the generations")
    ()
    >>> answers.recall(3, by=5), answers.recall(4, by=6)
    (Recalled(made=True, generations=b'the generations'), Recalled(made=False, generations=b''))
    """

    def __init__(self) -> None:
        self._made: dict[int, bytes] = {}
        self._under_way: dict[int, list[int]] = {}
        """Put -> requests that wait for its end."""
        self._left: set[int] = set()
        """Those of them whose callers do not wait."""
        self._forgotten = 0
        """The last put whose answer is not kept any more."""

    @classmethod
    def restored(cls, made: Mapping[int, bytes]) -> PutAnswers:
        """Those that the journal has of a session, in the order of the puts."""
        answers = cls()
        answers._made.update(made)
        answers._forgotten = min(made) - 1 if len(made) >= KEPT else 0
        return answers

    def made(self, put: int) -> bytes | None:
        """The packed generations of a put that is known to be made."""
        return self._made.get(put)

    def begin(self, put: int) -> None:
        """The put is answered later, with `end`."""
        self._under_way[put] = []

    def leave(self, put: int) -> None:
        """The caller of a put does not wait for its answer any more."""
        if put in self._under_way:
            self._left.add(put)

    def has_left(self, put: int) -> bool:
        """Whether the caller of a put that is under way has left."""
        return put in self._left

    def end(self, put: int, generations: bytes | None) -> tuple[int, ...]:
        """A put was made, with the packed generations of its rows, or has failed (None).

        Returns:
            Requests for which `recall` has returned None: they get its answer now.
        """
        if generations is not None:
            made = self._made
            made[put] = generations
            if len(made) > KEPT:
                oldest = next(iter(made))
                del made[oldest]
                self._forgotten = max(self._forgotten, oldest)
        self._left.discard(put)
        return tuple(self._under_way.pop(put, ())) if self._under_way else ()

    def recall(self, put: int, by: int) -> Recalled | None:
        """Whether a put, which this session has sent earlier, was made; None: it is being written,
        and `end` returns the request `by`.

        Raises:
            DataPlaneError: too many puts were made since.
        """
        if put in self._under_way:
            self._under_way[put].append(by)
            return None
        if put in self._made:
            return Recalled(True, self._made[put])
        if put <= self._forgotten:
            raise DataPlaneError(
                f"Whether a put was made is not known any more: this client has made {KEPT} others since. Look at the rows."
            )
        return Recalled(False)
