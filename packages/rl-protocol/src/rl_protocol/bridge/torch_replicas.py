"""TorchReplicas: ranks of a torch process group as replicas for `tqbridge` (extra `[torch]`)."""

from __future__ import annotations

import torch
import torch.distributed as dist

from rl_protocol.errors import WorkerError


class TorchReplicas:
    """The ranks of one tensor, pipeline or context parallel group; rank 0 is the leader.

    Args:
        group: a group of any backend; None: all ranks. Its timeout is the deadline of `share`.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self._device = (
            torch.device("cuda", torch.cuda.current_device())
            if dist.get_backend(group) == "nccl"
            else torch.device("cpu")
        )  # with its index: `share` may run in another thread, which has another current device
        self.leader = dist.get_rank(group) == 0

    def share(self, message: bytes | None) -> bytes:
        """Broadcast the leader's bytes.

        Raises:
            WorkerError: a rank has ended, or did not take part within the group's timeout.
        """
        sent = message if message is not None else b""
        size = torch.tensor([len(sent)], dtype=torch.int64, device=self._device)
        self._broadcast(size)
        if not size.item():
            return b""
        data = torch.empty(int(size.item()), dtype=torch.uint8, device=self._device)
        if self.leader:
            data.copy_(torch.frombuffer(bytearray(sent), dtype=torch.uint8))
        self._broadcast(data)
        return sent if self.leader else data.cpu().numpy().tobytes()

    def _broadcast(self, tensor: torch.Tensor) -> None:
        try:
            dist.broadcast(tensor, group=self._group, group_src=0)
        except RuntimeError as error:  # torch.distributed has no narrower error for all backends
            raise WorkerError(f"A replica of this rank has ended, or did not take part in time: {error}") from error
