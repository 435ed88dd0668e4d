"""The error of calls that belong to a controller that has ended."""

from __future__ import annotations

from rl_protocol.errors import PlaneLostError


class ControllerReplaced(PlaneLostError):
    """The controller has ended, and with it the memory that it gave to this call.

    The call begins again at the successor; no caller of the client sees this error.
    """
