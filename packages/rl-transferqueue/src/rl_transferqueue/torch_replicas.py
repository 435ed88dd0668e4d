"""The ranks of a torch process group as replicas of each other for `tqbridge` (extra `[torch]`)."""

from __future__ import annotations

import torch
import torch.distributed as dist

from rl_protocol.errors import WorkerError


class TorchReplicas:
    """The ranks of one tensor, pipeline or context parallel group; the first of them leads. See `rl_transferqueue.bridge.Replicas`.

    Args:
        group: a group of any backend; None: all ranks.

    The deadline of `share` is the timeout the group was made with.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self._device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
        self.leader = dist.get_rank(group) == 0

    def share(self, message: bytes | None) -> bytes:
        """See `Replicas.share`.

        Raises:
            WorkerError: a rank has ended, or did not come until the group's timeout.
        """
        mine = message if message is not None else b""
        size = torch.tensor([len(mine)], dtype=torch.int64, device=self._device)
        self._broadcast(size)
        if not size.item():
            return b""
        data = torch.empty(int(size.item()), dtype=torch.uint8, device=self._device)
        if self.leader:
            data.copy_(torch.frombuffer(bytearray(mine), dtype=torch.uint8))
        self._broadcast(data)
        return mine if self.leader else data.cpu().numpy().tobytes()

    def _broadcast(self, tensor: torch.Tensor) -> None:
        try:
            dist.broadcast(tensor, group=self._group, group_src=0)
        except RuntimeError as error:  # torch.distributed has no narrower one that all backends raise
            raise WorkerError(f"A replica of this rank has left, or did not come in time: {error}") from error
