"""A cache of headers keeps what it made, and makes no caller wait."""

from __future__ import annotations

import pytest
from forked import in_a_fork

from rl_transferqueue.wire.header_cache import HeaderCache


def test_a_result_is_made_once_and_dropped_with_the_older_half() -> None:
    made: list[bytes] = []
    cache = HeaderCache(lambda packed: made.append(packed) or len(packed), most_bytes=2048)
    assert [cache(b"a"), cache(b"a"), cache(b"bc")] == [1, 1, 2]
    assert (made, len(cache)) == ([b"a", b"bc"], 2)
    for number in range(64):
        cache(b"%d" % number)
    assert len(cache) < 8
    assert cache(b"a") == 1
    assert made.count(b"a") == 2


@pytest.mark.filterwarnings("ignore:.*fork.*")
def test_a_fork_at_any_moment_can_use_it() -> None:
    cache = HeaderCache(len)
    with cache._lock:  # as another thread has it
        assert in_a_fork(lambda: (cache(b"abc"), cache(b"abc"))) == "(3, 3)"
    assert len(cache) == 0
    cache(b"abc")
    assert len(cache) == 1
