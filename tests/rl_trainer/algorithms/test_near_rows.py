"""Rows on the hosts of their ranks, within the balance of tokens."""

from __future__ import annotations

from itertools import chain

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_protocol import balanced_parts
from rl_trainer.algorithms.batching import split_over_ranks
from rl_trainer.algorithms.near_rows import NearRows
from rl_trainer.config.optim import Schedule


def tokens(lengths, parts):
    return sum(int(lengths[list(part)].sum()) for part in parts)


def test_rows_go_to_the_rank_of_their_host_until_it_is_full():
    """By hand: ten rows of 10 tokens on two ranks, 7 of them on the first host; 5 rows each are
    even, and with a slack of 1/5 a rank has at most 60 tokens.
    """
    lengths = np.full(10, 10)
    nbytes = np.array([[8, 0]] * 7 + [[0, 8]] * 3)
    plain = [[part] for part in balanced_parts(lengths, 2)]
    assert plain == [[[0, 2, 4, 6, 8]], [[1, 3, 5, 7, 9]]]
    assert NearRows(nbytes=nbytes, slack=0.0).deal(lengths, plain) == [[[0, 1, 2, 3, 4]], [[5, 6, 7, 8, 9]]]
    near = NearRows(nbytes=nbytes, slack=0.2)
    dealt = near.deal(lengths, plain)
    assert dealt == [[[0, 1, 2, 3, 4, 5]], [[6, 7, 8, 9]]]
    assert (near.local_bytes(plain), near.local_bytes(dealt)) == (6 * 8, 9 * 8)


def test_the_longest_rows_choose_first():
    """Rank 0 has room for the row of 7 tokens and one of 1, of the four rows on its host."""
    lengths = np.array([1, 7, 3, 3, 2])
    nbytes = np.array([[1, 0], [7, 0], [3, 0], [3, 0], [0, 2]])
    plain = [[part] for part in balanced_parts(lengths, 2)]
    assert max(tokens(lengths, parts) for parts in plain) == 8
    assert NearRows(nbytes=nbytes, slack=0.0).deal(lengths, plain) == [[[0, 1]], [[2, 3, 4]]]


def test_rows_that_would_leave_a_rank_without_any_stay():
    lengths, plain = np.array([4, 1]), [[[0]], [[1]]]
    everything_on_the_first = np.array([[9, 0], [9, 0]])
    assert NearRows(nbytes=everything_on_the_first, slack=1.0).deal(lengths, plain) is plain


def test_rows_whose_hosts_are_no_reason_to_move_stay():
    lengths = np.arange(1, 9)
    plain = [[part] for part in balanced_parts(lengths, 2)]
    for nbytes in (np.zeros((8, 2), np.int64), np.full((8, 2), 5)):
        assert NearRows(nbytes=nbytes, slack=0.5).deal(lengths, plain) is plain


@settings(max_examples=150)
@given(st.data())
def test_balance_holds_and_no_rank_reads_more_of_other_hosts(data):
    rows = data.draw(st.integers(4, 40))
    lengths = np.array(data.draw(st.lists(st.integers(1, 60), min_size=rows, max_size=rows)))
    hosts = data.draw(st.lists(st.integers(0, 2), min_size=2, max_size=4))  # of each rank
    where = data.draw(st.lists(st.integers(0, 2), min_size=rows, max_size=rows))  # of each row
    nbytes = np.array([[lengths[row] * (where[row] == host) for host in hosts] for row in range(rows)])
    near = NearRows(nbytes=nbytes, slack=data.draw(st.sampled_from([0.0, 0.05, 0.3])))
    schedule = Schedule(
        epochs=data.draw(st.integers(1, 2)),
        mini_batch_rows=data.draw(st.integers(2, 40)),
        seed=data.draw(st.integers(0, 9)),
    )
    plain, dealt = (split_over_ranks(lengths, schedule, 3, len(hosts), it) for it in (None, near))

    def by_step(shares):
        return [
            [[share.rows[place] for place in step] for share, step in zip(shares, steps, strict=True)]
            for steps in zip(*(share.mini_batches for share in shares), strict=True)
        ]

    for before, after in zip(by_step(plain), by_step(dealt), strict=True):
        assert sorted(chain(*after)) == sorted(chain(*before))  # the same mini-batch
        heaviest = max(int(lengths[part].sum()) for part in before)
        assert max(int(lengths[part].sum()) for part in after) <= (1 + near.slack) * heaviest
    assert all(share.rows for share in dealt)

    def total(shares):
        return max(
            sum(int(lengths[share.rows[place]]) for step in share.mini_batches for place in step) for share in shares
        )

    def local(shares):
        return sum(int(nbytes[list(share.rows), rank].sum()) for rank, share in enumerate(shares))

    assert total(dealt) <= (1 + near.slack) * total(plain)
    assert dealt == plain or local(dealt) > local(plain)


def test_half_of_the_rows_on_each_of_two_hosts_are_nearly_all_read_there():
    """512 rows of which a random half is on each host: split by tokens, half of the bytes cross."""
    rng = np.random.default_rng(5)
    lengths, where = rng.integers(50, 500, 512), rng.integers(0, 2, 512)
    nbytes = np.stack([lengths * 24 * (where == host) for host in (0, 0, 1, 1)], axis=1)
    near = NearRows(nbytes=nbytes, slack=0.05)
    plain = [[part] for part in balanced_parts(lengths, 4)]
    everything = int(lengths.sum()) * 24
    assert near.local_bytes(plain) < 0.6 * everything
    assert near.local_bytes(near.deal(lengths, plain)) > 0.9 * everything
