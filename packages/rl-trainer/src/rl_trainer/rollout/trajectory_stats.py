"""Per-trajectory rollout statistics, stored as row tags so that the driver can aggregate them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from rl_protocol import KVBatchMeta, RowKey, Tag
from rl_trainer.algorithms.metrics import stats

FULL = "response_length"
"""`RolloutStats.finish` of a trajectory that has reached rollout.response_length."""
_TURNS, _CALLS, _ERRORS, _FINISH = "turns", "tool_calls", "tool_errors", "finish"


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutStats:
    """Statistics of one trajectory."""

    turns: int
    """Generations of the policy."""
    tool_calls: int = 0
    """Tool calls, including those that were answered with an error."""
    tool_errors: int = 0
    """Tool calls that failed: unreadable, of an unknown tool, or of a tool that failed or timed
    out.
    """
    finish: str = "stop"
    """Why it ended."""

    def tags(self) -> Tag:
        """As tags of its row."""
        return {_TURNS: self.turns, _CALLS: self.tool_calls, _ERRORS: self.tool_errors, _FINISH: self.finish}


def rollout_metrics(rows: KVBatchMeta) -> dict[str, float]:
    """Metrics per session, over its trajectories.

    `num_turns` (verl's name), `agent/tool_calls`, `agent/tool_errors`, the shares
    `agent/finish/<why>`, and `rollout/forks`: trajectories beyond the first, each of which began
    with a context that continued none of the others. Empty if no trajectory has statistics.
    """
    sums: dict[tuple[str, int], Counter[str]] = {}
    trajectories: Counter[tuple[str, int]] = Counter()
    finish: dict[tuple[str, int], tuple[int, str]] = {}
    for key, tag in zip(rows.keys, rows.tags or ({},) * len(rows), strict=True):
        if _TURNS not in tag:
            continue
        name = RowKey.parse(key)
        session = name.uid, name.session
        counted = {field: int(tag[field] or 0) for field in (_TURNS, _CALLS, _ERRORS)}
        sums.setdefault(session, Counter()).update(counted)
        trajectories[session] += 1
        finish[session] = max(finish.get(session, (-1, "")), (name.index, str(tag[_FINISH])))
    ends = Counter(why for _, why in finish.values())
    return {
        **stats("num_turns", [one[_TURNS] for one in sums.values()]),
        **stats("agent/tool_calls", [one[_CALLS] for one in sums.values()]),
        **stats("agent/tool_errors", [one[_ERRORS] for one in sums.values()]),
        **stats("rollout/forks", [count - 1 for count in trajectories.values()]),
        **{f"agent/finish/{why}": count / len(finish) for why, count in ends.items()},
    }
