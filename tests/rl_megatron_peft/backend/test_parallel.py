"""Work of the first rank: the others get what it returns, or fail as it does."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl_megatron_peft import AdapterError
from rl_protocol import OutputError

PATH = Path("step-1")


@pytest.fixture
def on_rank(monkeypatch):
    """on_rank(rank, work): call `on_first_rank` there; the first rank must be called first."""
    import torch

    from rl_megatron_peft.backend import parallel

    told = []

    def gather(value, device):
        told.append(value)
        return [told[0], {}]

    monkeypatch.setattr(parallel, "all_gather_json", gather)

    def call(rank, work):
        monkeypatch.setattr(parallel.dist, "get_rank", lambda: rank)
        return parallel.on_first_rank(work, PATH, torch.device("cpu"))

    return call


def never():
    pytest.fail("only the first rank does the work")


def test_all_ranks_get_the_text_of_the_first_one(on_rank):
    assert on_rank(0, lambda: "scratch") == "scratch"
    assert on_rank(1, never) == "scratch"


def test_work_may_return_nothing(on_rank):
    assert on_rank(0, lambda: None) == ""
    assert on_rank(1, never) == ""


@pytest.mark.parametrize(
    ("error", "others"),
    [
        (AdapterError("it contradicts itself", file="f", field="x"), AdapterError),
        (OutputError("it can't be written", path="step-1"), OutputError),
        (RuntimeError("of a library"), OutputError),
    ],
    ids=lambda one: one.__name__ if isinstance(one, type) else type(one).__name__,
)
def test_every_rank_learns_why_the_first_one_failed(on_rank, error, others):
    """The others wait for that, so the first one must not raise before it has told them."""

    def fails():
        raise error

    with pytest.raises(type(error)) as first:
        on_rank(0, fails)
    assert first.value is error
    with pytest.raises(others) as other:
        on_rank(1, never)
    assert str(other.value) == str(error)
    if isinstance(other.value, AdapterError):
        assert (other.value.file, other.value.field) == ("f", "x")
    else:
        assert other.value.path == "step-1"
