"""Asks the data plane which hosts have the rows of a step."""

from __future__ import annotations

from dataclasses import replace

from rl_trainer.driver.stage_calls import PlacedRows, StepRows
from rl_trainer.driver.trainer_parts import TrainerParts


class RowFinder:
    """Finds the hosts of rows, so that ranks get rows of their own host.

    It asks only in runs whose models have ranks on several hosts. With `LoopConfig.deterministic`
    it asks never, since the hosts of rows depend on delays, nor with `LoopConfig.keep_batches`,
    since a kept batch is trained again without hosts.

    Args:
        parts: of the run.
    """

    def __init__(self, parts: TrainerParts) -> None:
        loop, workers = parts.loop, parts.workers
        hosts = {workers.hosts.get(rank.process) for rank in (*workers.actor, *workers.ref, *workers.critic)}
        self._plane = parts.plane
        self._slack = 0.0 if loop.deterministic or loop.keep_batches or len(hosts) == 1 else loop.local_rows_slack
        self._timeout_s = loop.stage_timeout_s

    async def placed(self, rows: StepRows) -> StepRows:
        """The rows with their hosts, where these matter.

        Raises:
            MissingDataError: a row is not there.
            PlaneTimeout, PlaneLostError: the data plane does not answer.
        """
        if not self._slack:
            return rows
        found = await self._plane.row_hosts(rows.names.partition, rows.names.keys, timeout_s=self._timeout_s)
        return replace(rows, placed=PlacedRows(hosts=found.hosts, nbytes=found.nbytes, slack=self._slack))
