"""Numbers with their nouns, for messages."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """The number and the noun, which gets an s unless the number is 1.

    Examples:
        >>> counted(1, "row"), counted(2, "row")
        ('1 row', '2 rows')
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
