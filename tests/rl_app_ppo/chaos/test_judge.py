"""Runs with a known defect are counted as such."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

import pytest

from rl_app_ppo.chaos.events import Event, EventLog, read_events
from rl_app_ppo.chaos.judge import count
from rl_app_ppo.chaos.stand_in import ActorState


def events(*lines):
    """Events of (kind, number, *uids)."""
    return [Event(kind=kind, number=number, uids=tuple(uids)) for kind, number, *uids in lines]


GOOD = events(
    ("begin", 0),
    ("rollout", 0, "a", "b"),
    ("acknowledged", 0, "a"),
    ("version", 1),
    ("saved", 1),
    ("begin", 1),
    ("version", 1),
    ("rollout", 1, "b"),
    ("acknowledged", 1, "b"),
    ("end", 0),
)
WANTED = ActorState(weights="w", version=2, trained=[[(1, 0), (1, 1)], [(2, 0), (2, 1)]])


@dataclass
class Wrong:
    """The counts that are not zero."""

    lost: int = 0
    doubled: int = 0
    held: int = 0
    went_back: int = 0
    weights_differ: bool = False
    lines: list[Event] = field(default_factory=lambda: GOOD)
    final: ActorState | None = field(default_factory=lambda: WANTED)


DEFECTS = {
    "nothing": Wrong(),
    "a response was not trained": Wrong(
        lost=1, weights_differ=True, final=ActorState(weights="x", trained=[[(1, 0), (1, 1)], [(2, 0)]])
    ),
    "a response was trained again": Wrong(
        doubled=1, final=ActorState(weights="w", trained=[*WANTED.trained, [(2, 0)]])
    ),
    "nothing was trained": Wrong(lost=4, weights_differ=True, final=None),
    "an acknowledged prompt was generated again": Wrong(
        lost=1, lines=[*GOOD[:3], *events(("rollout", 0, "a")), *GOOD[3:]]
    ),
    "responses came once their call was given up": Wrong(
        lines=[
            *GOOD[:2],
            *events(("failed", 0, "a", "b"), ("acknowledged", 0, "a"), ("rollout", 0, "a", "b")),
            *GOOD[2:],
        ]
    ),
    "responses that came before are generated again": Wrong(
        lost=1, lines=[*GOOD[:3], *events(("failed", 0, "a", "b"), ("rollout", 0, "a")), *GOOD[3:]]
    ),
    "responses to a prompt that was given up once are generated a third time": Wrong(
        lost=1,
        lines=[
            *GOOD[:2],
            *events(("failed", 0, "a"), ("rollout", 0, "a"), ("acknowledged", 0, "a"), ("rollout", 0, "a")),
            *GOOD[3:],
        ],
    ),
    "rows are left": Wrong(held=3, lines=[*GOOD[:-1], *events(("end", 3))]),
    "the weights went back": Wrong(went_back=1, lines=[*GOOD[:-1], *events(("version", 0))]),
    "old weights generated": Wrong(went_back=1, lines=[*GOOD[:7], *events(("rollout", 0, "b")), *GOOD[8:]]),
    "only a damaged checkpoint had its training": Wrong(
        lines=[*GOOD[:5], *events(("damaged", 0), ("begin", 0), ("rollout", 0, "a")), *GOOD[6:]]
    ),
    "more than the damaged checkpoint was lost": Wrong(
        lost=1,
        lines=[*GOOD[:5], *events(("damaged", 0), ("begin", 0), ("rollout", 0, "a"), ("rollout", 0, "a")), *GOOD[6:]],
    ),
    "the journal dropped a damaged row": Wrong(
        lines=[*GOOD[:3], *events(("damaged", 0), ("begin", 0), ("dropped", 1), ("rollout", 0, "a")), *GOOD[3:]]
    ),
    "the journal dropped a row that nobody damaged": Wrong(
        lost=1, lines=[*GOOD[:3], *events(("begin", 0), ("dropped", 1), ("rollout", 0, "a")), *GOOD[3:]]
    ),
    "a published checkpoint was not used": Wrong(went_back=1, lines=[*GOOD[:5], *events(("begin", 0)), *GOOD[6:]]),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_defects_are_counted(defect):
    wrong = DEFECTS[defect]
    counted = count(wrong.lines, wrong.final, WANTED)
    names = ("lost", "doubled", "held", "went_back", "weights_differ")
    assert {name: getattr(counted, name) for name in names} == {name: asdict(wrong)[name] for name in names}
    assert counted.acknowledged == 2


def test_events_survive_in_their_order(tmp_path):
    path = tmp_path / "events"
    assert read_events(path) == []
    logs = [EventLog(path), EventLog(path)]
    for number, event in enumerate(GOOD):
        logs[number % 2].write(event)
    for log in logs:
        log.close()
    assert read_events(path) == GOOD
