"""What a run with faults has lost, doubled or left behind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

import msgspec

from rl_app_ppo.chaos.events import Event
from rl_app_ppo.chaos.schedule import Schedule, Strike
from rl_app_ppo.chaos.stand_in import ActorState

Kind = Literal["plane", "app"]
"""plane: journal, data plane, replay buffers and trainer, with a stand-in for the model. app: the
whole application."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The count of one run."""

    kind: Kind
    schedule: Schedule
    struck: tuple[int, ...]
    """Places in the schedule of the strikes that hit something."""
    starts: int
    """How often the run was started."""
    acknowledged: int
    """Prompts whose responses the data plane has acknowledged; of app the responses in its record.
    """
    trained: int
    """Responses that the final weights were trained on."""
    lost: int
    """Responses that were not trained, and acknowledged prompts that were generated again."""
    doubled: int
    """Responses that were trained more than once."""
    held: int
    """Rows that were left in the data plane at the end; of app the prompts that its driver held."""
    went_back: int
    """Versions or checkpoints that are older than one before them."""
    hung: bool
    """It did not end in time."""
    left: tuple[str, ...]
    """Processes, files and shared memory that were left behind."""
    failure: str
    """What else was wrong; empty: nothing."""
    seconds: float

    @property
    def good(self) -> bool:
        """Whether nothing was lost, doubled, hung or left behind."""
        counts = self.lost + self.doubled + self.held + self.went_back
        return not (counts or self.hung or self.left or self.failure)

    @property
    def strikes(self) -> Sequence[Strike]:
        """Those that hit something."""
        return [self.schedule.strikes[place] for place in self.struck]


class Counted(msgspec.Struct, frozen=True, kw_only=True):
    """What the events of a run and its final state say."""

    acknowledged: int
    trained: int
    lost: int
    doubled: int
    held: int
    went_back: int
    weights_differ: bool


def count(events: Sequence[Event], final: ActorState | None, wanted: ActorState) -> Counted:
    """Count what a run has done.

    What a rollout process stores once the driver has given its call up comes too late, and its
    prompts are generated again. A changed byte may cost what only the changed file had: prompts
    that were trained between the newest whole checkpoint and the changed one, and rows that the
    journal dropped.

    Args:
        events: of all its processes, the oldest first.
        final: state of the trainer in the last checkpoint; None: there is none.
        wanted: state after a run without faults.
    """
    final = final if final is not None else ActorState()
    have, want = (Counter(row for step in state.trained for row in step) for state in (final, wanted))
    acknowledged, failed, again = set[str](), set[str](), 0
    saved, excused, damaged = 0, 0, False
    for event in events:
        match event.kind:
            case "acknowledged":
                acknowledged.update(set(event.uids) - failed)
            case "failed":
                failed.update(set(event.uids) - acknowledged)
            case "rollout":
                again += len(acknowledged.intersection(event.uids))
                failed.difference_update(event.uids)
            case "saved":
                saved = max(saved, event.number)
            case "damaged":
                excused += sum(len({row for row, _ in step}) for step in wanted.trained[event.number : saved])
                saved, damaged = event.number, True
            case "dropped":
                excused += event.number if damaged else 0
            case _:
                pass
    return Counted(
        acknowledged=len(acknowledged),
        trained=have.total(),
        lost=(want - have).total() + max(0, again - excused),
        doubled=(have - want).total(),
        held=sum(event.number for event in events if event.kind == "end"),
        went_back=_went_back(events),
        weights_differ=final.weights != wanted.weights,
    )


def _went_back(events: Sequence[Event]) -> int:
    """How often a version is older than the one before it, or a start than a saved checkpoint."""
    back = saved = version = 0
    for event in events:
        if event.kind == "saved":
            saved = max(saved, event.number)
        elif event.kind == "damaged":
            saved = event.number
        elif event.kind == "begin":
            back += event.number < saved
            version = event.number
        elif event.kind in ("version", "rollout"):
            back += event.number < version
            version = max(version, event.number) if event.kind == "version" else version
    return back
