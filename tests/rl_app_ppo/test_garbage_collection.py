"""Garbage collection during the start of a process."""

from __future__ import annotations

import gc
import weakref

import pytest

from rl_app_ppo.garbage_collection import begin_gc, without_gc


@pytest.fixture(autouse=True)
def unfrozen():
    yield
    gc.enable()
    gc.unfreeze()


@pytest.mark.parametrize("fails", [False, True])
def test_garbage_is_not_searched_for_while_libraries_are_imported_and_is_again_afterwards(fails):
    frozen = gc.get_freeze_count()
    try:
        with without_gc():
            assert not gc.isenabled()
            if fails:
                raise ImportError("no such library")
    except ImportError:
        assert fails
    finally:
        assert gc.isenabled()
        assert gc.get_freeze_count() > frozen
        gc.unfreeze()


def test_garbage_of_a_start_is_kept_and_later_garbage_is_not():
    class Node:
        def __init__(self):
            self.itself = self

    gc.disable()
    early = weakref.ref(Node())
    begin_gc()
    late = weakref.ref(Node())
    gc.collect()
    assert gc.isenabled()
    assert (early() is None, late() is None) == (False, True)


def test_it_changes_nothing_where_it_is_enabled():
    frozen = gc.get_freeze_count()
    begin_gc()
    assert gc.get_freeze_count() == frozen
