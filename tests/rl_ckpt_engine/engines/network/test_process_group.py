"""Membership in a group, with a group whose end can be watched."""

from __future__ import annotations

import threading

from rl_ckpt_engine.engines.network.process_group import ProcessGroup
from rl_ckpt_engine.engines.network.torch_group import GlooCollective


def test_leaving_a_group_does_not_wait_for_its_destructor():
    """That of gloo waits for a broadcast that began during the abort."""
    seen, release, ended = [], threading.Event(), threading.Event()

    class Group:
        def abort(self):
            seen.append("abort")
            raise RuntimeError("a member died")

        def __del__(self):
            release.wait(60)
            ended.set()

    group = ProcessGroup(GlooCollective(), abandoned=lambda: None)
    group._group = Group()
    group.leave()
    assert seen == ["abort"]
    assert not ended.is_set()
    release.set()
    assert ended.wait(60)
    group.leave()
    assert seen == ["abort"]
