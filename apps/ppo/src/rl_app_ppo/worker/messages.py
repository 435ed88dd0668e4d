"""Messages between driver and worker processes: building and warm-up."""

from __future__ import annotations

import msgspec

from rl_app_ppo.rank_network import RankNetwork
from rl_ckpt_engine import PluginPolicy
from rl_protocol.support.rendezvous import RendezvousAddress

CLOSE_RECORD = "record.close"
"""Call that has a process write the rest of its record, at the end of a run."""


class WorkerPlace(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a worker process runs."""

    host: str
    """Name of its host."""
    memory: str
    """Processes with equal values share memory and process ids."""
    network: str
    """Processes with equal values reach each other through loopback."""
    pid: int
    heartbeat: str
    """File of its heartbeat, on its host."""
    gpus: str = ""
    """Those that it sees, as in CUDA_VISIBLE_DEVICES."""


class BuildCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Load the models and connect to the data plane."""

    config: str
    """The resolved configuration, YAML."""
    model_path: str
    reference_path: str = ""
    """Folder of the reference policy; empty: the one of the policy."""
    adapter_path: str = ""
    """PEFT folder that the policy starts from; empty: none."""
    critic_adapter_path: str = ""
    """PEFT folder that the critic starts from; empty: none."""
    plane: bytes
    """PlaneDescriptor, JSON."""
    rank: int = 0
    """Rank among the processes that share the model."""
    network: RankNetwork = RankNetwork()
    """Through which these processes reach each other."""
    weights: RankNetwork = RankNetwork()
    """Through which the ends of the weight sync reach each other."""
    rendezvous: RendezvousAddress | None = None
    """Where they meet, as rank 0 has answered `rendezvous`; None: there is one rank."""
    samples: str = ""
    """Folder of the samples of validation responses and their scores; empty: write none."""
    record: str = ""
    """Folder of the record of the run; empty: record nothing."""
    lends_gpu: bool = False
    """Whether a rollout replica uses the GPU of the process, too."""
    plugins: PluginPolicy = PluginPolicy()
    """Which plug-ins of the weight synchronization may load, as the driver has read it."""
    trusted_files: dict[str, str] = {}
    """Files of code that the user allows: path -> sha256, which each host checks."""
    data_files: dict[str, dict[str, str]] = {}
    """SHA-256 of the data files of the run by key and path, which the rollout checks."""


class WarmupProgress(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Progress of the demo model's warm-up; the last one has the path."""

    step: int = 0
    total: int = 0
    loss: float = 0.0
    path: str = ""
