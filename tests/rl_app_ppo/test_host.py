"""Inside a worker process, before and while its worker is built."""

from __future__ import annotations

import gc

import pytest

from rl_app_ppo.host import uncollected


@pytest.mark.parametrize("fails", [False, True])
def test_garbage_is_not_searched_for_while_libraries_are_imported_and_is_again_afterwards(fails):
    frozen = gc.get_freeze_count()
    try:
        with uncollected():
            assert not gc.isenabled()
            if fails:
                raise ImportError("no such library")
    except ImportError:
        assert fails
    finally:
        assert gc.isenabled()
        assert gc.get_freeze_count() > frozen
        gc.unfreeze()
