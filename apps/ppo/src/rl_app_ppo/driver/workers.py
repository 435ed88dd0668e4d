"""The worker processes of a run: their roles, their start, and the models they load."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec

from rl_app_ppo.cluster.heartbeats import OtherHost, Watched
from rl_app_ppo.cluster.host_group import WAIT_S, HostGroup, cluster_nodes, require_equal_versions
from rl_app_ppo.cluster.hung_processes import HungProcesses
from rl_app_ppo.cluster.lost_processes import ended
from rl_app_ppo.cluster.placement import head_host, node_gpus, require_cpus, require_free_gpus
from rl_app_ppo.cluster.ray_actor import RayProcess, RayWorker
from rl_app_ppo.config.devices import PlannedProcess, described_gpus, host_bundles, idle_gpus, plan_processes
from rl_app_ppo.config.hosts import HostBundle, NodeResources, match_nodes
from rl_app_ppo.config.loading import to_yaml
from rl_app_ppo.config.model_path import given_critic_adapter, given_reference
from rl_app_ppo.config.placement import Role, WorkerGroup, syncs_by_nccl
from rl_app_ppo.config.schema import AppConfig
from rl_app_ppo.driver.adapter_conversion import initial_adapter
from rl_app_ppo.inputs.input_files import Digests
from rl_app_ppo.outputs.console import Screen
from rl_app_ppo.outputs.run_folder import RunFiles
from rl_app_ppo.outputs.startup_times import Startup
from rl_app_ppo.rank_network import RankNetwork
from rl_app_ppo.watchdog.unanswered_calls import CallLog
from rl_app_ppo.worker.messages import CLOSE_RECORD, BuildCall
from rl_ckpt_engine import PluginPolicy
from rl_protocol import ConfigError, RLError, WorkerError
from rl_protocol.support.network_interface import this_network
from rl_protocol.support.rendezvous import RendezvousAddress
from rl_protocol.support.trusted_files import trusted_files
from rl_trainer import Workers, needs_reference
from rl_transferqueue import PlaneDescriptor

logger = logging.getLogger(__name__)
_RECORD_S = 60.0
"""Seconds that writing the rest of the records may take."""
_LOOK_S = 1.0
"""How often the nodes of the cluster are looked at while a run waits for one."""


class WorkerPool:
    """The worker processes of one run.

    Lifecycle: `require_resources`, then `start`, `ready` and `build`; `close` kills the processes.

    Attributes:
        processes: all processes that were started; that of the first actor is the first, since it
            makes the demo model while the others start.
        calls: the calls of all processes that wait.
        hung: the processes of the run that were killed since they hung.
    """

    def __init__(self, config: AppConfig, files: RunFiles) -> None:
        self._config = config
        self._files = files
        self._planned: Sequence[PlannedProcess] = ()
        self._hosts: HostGroup | None = None
        self._say: Callable[[str], None] = logger.info
        self._handles: dict[Role, list[RayWorker]] = {}
        self.processes: list[RayProcess] = []
        self.calls = CallLog()
        self.hung = HungProcesses()

    def __len__(self) -> int:
        return len(self._planned)

    @property
    def workers(self) -> Workers:
        """The processes by role, as the trainer takes them."""
        actor, ref = self._of("actor"), self._of("ref")
        colocated = needs_reference(self._config.algorithm, self._config.actor) and not ref
        return Workers(
            rollout=self._of("rollout"),
            reward=self._of("reward")[0],
            actor=actor,
            dp_ranks=self._config.replicas,
            ref=actor if colocated else ref,
            critic=self._of("critic"),
            hosts={process: process.memory for process in self.processes},
        )

    @property
    def rollout(self) -> list[RayWorker]:
        """All rollout workers."""
        return self._of("rollout")

    @property
    def replaceable(self) -> list[RayWorker]:
        """The rollout workers whose process can be replaced: no other role is in it."""
        return [worker for worker in self.rollout if worker.process.roles == ("rollout",)]

    async def require_resources(self, say: Callable[[str], None], nodes_s: float = 0.0) -> None:
        """Plan hosts and GPUs of all processes, and wait until Ray has what they need.

        Args:
            say: prints one line; with one host without GPUs it is not called.
            nodes_s: seconds to wait until enough nodes are in the cluster.

        Raises:
            ConfigError: see `devices.plan_processes`, `hosts.match_nodes` and
                `host_group.require_equal_versions`.
            WorkerError: see `placement.require_cpus`, `placement.require_free_gpus` and
                `HostGroup.open`.
        """
        self._say = say
        if self._config.trainer.nnodes > 1:
            await self._require_hosts(say, nodes_s)
            return
        gpus = node_gpus()
        self._planned = plan_processes(self._config, gpus)
        wanted = sum(process.gpus for process in self._planned)
        if wanted:
            say(f"GPUs: {wanted} of {gpus} of this node: {described_gpus(self._planned)}")
        if warning := idle_gpus(self._config, self._planned, gpus):
            say(f"warning: {warning}")
        await require_cpus(self._computing, self._config.ray.cpus_per_worker)
        await require_free_gpus(wanted)

    async def _require_hosts(self, say: Callable[[str], None], nodes_s: float) -> None:
        """Compare what several hosts need with the nodes of the cluster, and reserve it."""
        clock = asyncio.get_running_loop().time
        until, shown, waits = clock() + nodes_s, list[NodeResources](), False
        while True:
            nodes = sorted(cluster_nodes(), key=lambda node: node.gpus, reverse=True)
            try:
                bundles = self._bundles_on(nodes)
                if nodes != shown:
                    for line in (*(f"wanted: {bundle}" for bundle in bundles), *(f"node {node}" for node in nodes)):
                        say(line)
                shown = nodes
                match_nodes(bundles, nodes)
            except ConfigError as error:
                if clock() >= until:
                    raise
                if not waits:
                    say(f"the run waits up to {nodes_s:g} s (ray.start_timeout_s) for a node to join: {error.message}")
                waits = True
            else:
                if await require_equal_versions():
                    break
                if clock() >= until + WAIT_S:
                    raise WorkerError("Nodes of the Ray cluster end one after the other; see 'ray status'.")
            await asyncio.sleep(_LOOK_S)
        self._hosts = HostGroup(bundles)
        await self._hosts.open()

    def _bundles_on(self, nodes: Sequence[NodeResources]) -> Sequence[HostBundle]:
        """Plan all processes; what their hosts need."""
        config = self._config
        each = nodes[config.trainer.nnodes - 1].gpus if len(nodes) >= config.trainer.nnodes else 0
        self._planned = plan_processes(config, each)
        cpus = [config.ray.cpus_per_worker * cpus_used(process.group, config) for process in self._planned]
        return host_bundles(self._planned, cpus)

    @property
    def cpus_needed(self) -> float:
        """CPUs that all processes ask Ray for."""
        return self._computing * self._config.ray.cpus_per_worker

    @property
    def _computing(self) -> int:
        return sum(cpus_used(process.group, self._config) for process in self._planned)

    def pids(self) -> dict[int, str]:
        """The processes of this host that are ready: process id -> name."""
        return {process.pid: process.name for process in self.processes if process.pid}

    def heartbeats(self) -> list[Watched]:
        """The heartbeats of the processes that are ready and have not ended."""
        return [watched for process in self.processes if (watched := process.watched)]

    def worker_pids(self) -> dict[int, str]:
        """The same processes: process id -> description."""
        return {pid: f"Worker {name}" for pid, name in self.pids().items()}

    def ended_models(self) -> list[str]:
        """Which of the processes that are never replaced have ended, and how."""
        kept = [process for process in self.processes if process.pid and process.roles != ("rollout",)]
        return ended({process.pid: f"Worker {process.name}" for process in kept}, self.remote_ends())

    def remote_ends(self) -> dict[str, asyncio.Future[bytes]]:
        """Those of other hosts, for `named_remote_losses`."""
        found = [process for process in self.processes if process.host and process.roles != ("rollout",)]
        return {f"Worker {process.name} on {process.host}": process.end for process in found if process.end}

    def start(self) -> None:
        """Start the processes without waiting for them."""
        threads, cpus = self._config.trainer.threads_per_worker, self._config.ray.cpus_per_worker
        for planned in self._planned:
            log, reserved = self._files.logs / f"{planned.name}.log", cpus * cpus_used(planned.group, self._config)
            hosts = self._hosts
            host = None if hosts is None else hosts.bundle(planned.host)
            process = RayProcess(
                planned.roles,
                planned.name,
                log,
                threads,
                cpus=reserved,
                gpus=planned.gpus,
                lenders=[one for one in self.processes if one.name in planned.lenders],
                calls=self.calls,
                host=host,
                others=self.ended_models,
                hung=self.hung,
                missing_node=None if hosts is None else partial(hosts.missing_node, planned.host),
                say=self._say,
            )
            self.processes.append(process)
            for role in planned.roles:
                worker = RayWorker(process, role, planned.group.role_name(role, planned.rank))
                self._handles.setdefault(role, []).append(worker)

    async def ready(self, folder: Path) -> None:
        """Wait until all processes run, and connect to those of this host over Unix sockets.

        A run that writes Ray's timeline (trainer.profile_steps) calls them through Ray, so that the
        timeline shows the calls.

        Args:
            folder: of mode 0700, for the sockets.

        Raises:
            WorkerError: one died, or did not start within `ray.start_timeout_s`.
        """
        timeout_s = self._config.ray.start_timeout_s
        await asyncio.gather(*(process.ready(timeout_s) for process in self.processes))
        await asyncio.gather(*(process.share_gpus() for process in self.processes))
        if not self._config.trainer.profile_steps:
            await asyncio.gather(*(process.connect(folder) for process in self.processes))

    def other_hosts(self) -> dict[OtherHost, RankNetwork]:
        """The other hosts of a run on several: through which network this one reaches each."""
        if self._config.trainer.nnodes == 1:
            return {}
        others = {process.host.memory: (process.host, process.network) for process in self.processes if process.host}
        interface, ours = self._config.trainer.network_interface, this_network()
        return {
            host: RankNetwork() if network == ours else RankNetwork(interface=interface, peer=head_host())
            for host, network in others.values()
        }

    async def make_demo_model(self, screen: Screen, startup: Startup) -> Path:
        """Have the first actor make the demo's base model; returns its folder."""
        path = ""
        async for progress in self._of("actor")[0].process.warm_up(to_yaml(self._config)):
            if progress.path:
                path = progress.path
                continue
            startup.describe(f"warm-up of the demo's base model, step {progress.step} of at most {progress.total}")
            screen.bar("warm-up", progress.step, progress.total)
        screen.clear_bar()
        return Path(path)

    async def build(self, model_path: Path, plane: PlaneDescriptor, plugins: PluginPolicy, data_files: Digests) -> None:
        """Have all processes load their models and connect to the data plane.

        Processes that use the GPUs of others come after these: vLLM takes a part of a GPU's memory,
        which must be free then.

        Args:
            model_path: folder of the policy.
            plane: where the data plane is.
            plugins: which plug-ins of the weight synchronization may load.
            data_files: digests of the data files of the run.
        """
        meetings = await self._open_rendezvous()
        resolved, described = to_yaml(self._config), msgspec.json.encode(plane)
        teacher = given_reference(self._config)
        reference = "" if teacher is None else str(teacher.absolute())
        payloads, lenders = list[bytes](), {name for planned in self._planned for name in planned.lenders}
        for planned in self._planned:
            call = BuildCall(
                config=resolved,
                model_path=str(model_path),
                reference_path=reference,
                adapter_path=initial_adapter(self._config, self._files),
                critic_adapter_path=given_critic_adapter(self._config),
                plane=described,
                rank=0 if planned.roles == ("rollout",) else planned.rank,  # replicas share no model
                network=meetings[planned.group][0],
                rendezvous=meetings[planned.group][1],
                weights=self._network_of(self.processes),
                samples=str(self._files.samples),
                record=str(self._files.record),
                lends_gpu=planned.name in lenders,
                plugins=plugins,
                trusted_files=trusted_files(),
                data_files={key: dict(files) for key, files in data_files.items()},
            )
            payloads.append(msgspec.msgpack.encode(call))
        every = list(zip(self._planned, self.processes, payloads, strict=True))
        timeout_s = self._config.ray.start_timeout_s
        for borrows in (False, True):
            now = [one for one in every if bool(one[0].lenders) == borrows]
            await asyncio.gather(*(process.build(payload, timeout_s=timeout_s) for _, process, payload in now))

    async def _open_rendezvous(self) -> dict[WorkerGroup, tuple[RankNetwork, RendezvousAddress | None]]:
        """Have rank 0 of each group of several ranks listen for the others."""
        groups: dict[WorkerGroup, list[RayProcess]] = {}
        for planned, process in zip(self._planned, self.processes, strict=True):
            groups.setdefault(planned.group, []).append(process)
        timeout_s = self._config.ray.start_timeout_s

        async def open_one(group: WorkerGroup, ranks: Sequence[RayProcess]) -> RendezvousAddress | None:
            if len(ranks) == 1 or group.roles == ("rollout",):  # replicas share no model
                return None
            return await ranks[0].rendezvous(networks[group], timeout_s=timeout_s)

        interface = self._config.trainer.network_interface
        networks = {
            group: msgspec.structs.replace(self._network_of_ranks(ranks), interface=interface)
            for group, ranks in groups.items()
        }
        addresses = await asyncio.gather(*(open_one(group, ranks) for group, ranks in groups.items()))
        return {group: (networks[group], address) for group, address in zip(groups, addresses, strict=True)}

    def _network_of_ranks(self, ranks: Sequence[RayProcess]) -> RankNetwork:
        """Through which network the ranks of a model reach each other.

        NCCL has one interface in a process, which must reach the replicas, too, if it carries the
        weights.
        """
        return self._network_of(self.processes if syncs_by_nccl(self._config) else ranks)

    def _network_of(self, processes: Sequence[RayProcess]) -> RankNetwork:
        """Through which network these processes reach each other: loopback, if they share it."""
        if len({process.network for process in processes}) == 1:
            return RankNetwork()
        return RankNetwork(interface=self._config.trainer.network_interface, peer=head_host())

    async def close_records(self) -> None:
        """Have all processes write the rest of their records; what is lost is logged."""
        answers = [process.send(CLOSE_RECORD, b"") for process in self.processes]
        try:
            async with asyncio.timeout(_RECORD_S):
                for answer in answers:
                    await answer()
        except (RLError, TimeoutError) as error:
            logger.warning("The record of a process lacks its last second: %s", error)

    def close(self) -> None:
        """Kill the processes, and release their hosts."""
        for process in self.processes:
            process.kill()
        if self._hosts is not None:
            self._hosts.close()

    def _of(self, role: Role) -> list[RayWorker]:
        return self._handles.get(role, [])


def cpus_used(group: WorkerGroup, config: AppConfig) -> int:
    """Computing processes of a worker process: itself, or the ranks of its vLLM engine."""
    return config.rollout.tensor_model_parallel_size if group.roles == ("rollout",) else 1
