"""check_flow: columns are written before they are read, and only once."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_protocol import ConfigError
from rl_protocol.bridge import check_flow


@dataclass(frozen=True)
class Stage:
    name: str
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()


def test_columns_may_be_given_or_written_before() -> None:
    check_flow([Stage("roll", ("prompt",), ("response",)), Stage("train", ("prompt", "response"))], ["prompt"])
    check_flow([])


def test_a_column_without_a_writer_is_named_with_its_reader() -> None:
    with pytest.raises(ConfigError, match=r"Step 'train' reads column 'advantage', which no earlier step writes"):
        check_flow([Stage("roll", (), ("response",)), Stage("train", ("response", "advantage"))])


def test_a_step_cannot_read_what_it_writes_itself_or_what_comes_later() -> None:
    with pytest.raises(ConfigError, match="'x'"):
        check_flow([Stage("self", ("x",), ("x",))])
    with pytest.raises(ConfigError, match="'early' reads column 'x'"):
        check_flow([Stage("early", ("x",)), Stage("late", (), ("x",))])


def test_a_column_has_one_writer() -> None:
    with pytest.raises(ConfigError, match="'b' writes column 'x', which is written by step 'a' already"):
        check_flow([Stage("a", (), ("x",)), Stage("b", (), ("x",))])
    with pytest.raises(ConfigError, match="written before the first step already"):
        check_flow([Stage("a", (), ("x",))], ["x"])


@given(st.permutations(range(6)))
def test_only_the_order_of_a_chain_is_accepted(order: list[int]) -> None:
    steps = [Stage(f"s{i}", (f"c{i - 1}",) if i else (), (f"c{i}",)) for i in range(6)]
    chosen = [steps[i] for i in order]
    if list(order) == sorted(order):
        check_flow(chosen)
    else:
        with pytest.raises(ConfigError):
            check_flow(chosen)
