"""Which prompts the steps have drawn, exactly, while several steps are sampled at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

from rl_trainer.data.prompt_order import PromptOrder


def prompt_uid(turn: int, number: int) -> str:
    """Name of a prompt of a turn.

    >>> turn_of(prompt_uid(12, 3))
    12
    """
    return f"s{turn}-{number}"


def turn_of(uid: str) -> int:
    """The turn of a prompt with this name."""
    return int(uid[1:].partition("-")[0])


class PromptDraws:
    """Gives each step the next prompts of an order.

    Prompts that were drawn for steps which are not trained are drawn first after a restart, so
    every prompt of the order is drawn once.

    >>> draws = PromptDraws(PromptOrder(size=9, batch_size=2, seed=0))
    >>> _ = draws.draw(1, 2), draws.draw(2, 2), draws.draw(1, 1)
    >>> draws.trained(1)
    >>> draws.position, draws.untrained
    (5, (2, 3))

    Args:
        order: the endless sequence of prompts.

    Attributes:
        position: prompts of the order that were drawn.
    """

    def __init__(self, order: PromptOrder) -> None:
        self._order = order
        self.position = 0
        self._again: list[int] = []
        self._drawn: dict[int, list[int]] = {}

    def draw(self, step: int, count: int) -> list[int]:
        """[count] rows of the data set for a step: prompts to draw again, then new ones."""
        places, self._again = self._again[:count], self._again[count:]
        fresh = count - len(places)
        rows = [row for place in places for row in self._order.take(place, 1)]
        rows += self._order.take(self.position, fresh) if fresh else []
        self._drawn.setdefault(step, []).extend([*places, *range(self.position, self.position + fresh)])
        self.position += fresh
        return rows

    def places(self, step: int) -> tuple[int, ...]:
        """Places in the order of the prompts that a step has drawn."""
        return tuple(self._drawn.get(step, ()))

    def trained(self, step: int) -> None:
        """Forget the prompts of a step that was trained."""
        self._order.trained(self._drawn.pop(step, ()))

    @property
    def untrained(self) -> tuple[int, ...]:
        """Places in the order that were drawn for steps which are not trained, or are to be drawn
        again.
        """
        steps = (self._drawn[step] for step in sorted(self._drawn))
        return (*chain.from_iterable(steps), *self._again)

    def restore(
        self, position: int, untrained: Sequence[int], drawn: Mapping[int, Sequence[int]] | None = None
    ) -> None:
        """Continue from here.

        The untrained prompts are drawn first, but for those in `drawn`, which steps keep.
        """
        self.position = position
        self._drawn = {step: list(places) for step, places in (drawn or {}).items()}
        kept = set(chain.from_iterable(self._drawn.values()))
        self._again = [place for place in untrained if place not in kept]

    def rewind(self) -> None:
        """Draw the prompts of all steps that are not trained again."""
        self.restore(self.position, self.untrained)
