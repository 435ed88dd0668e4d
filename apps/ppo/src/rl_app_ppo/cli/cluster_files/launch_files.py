"""Files and commands that start a run on a cluster (`--launch`), from its configuration."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from importlib.metadata import version
from pathlib import PurePosixPath
from typing import Any

import yaml

from rl_app_ppo.checks.facts import Facts
from rl_app_ppo.checks.machine import check_engine_of_hosts
from rl_app_ppo.cli.cluster_files.cluster_job import AWAIT_HEAD, ClusterJob
from rl_app_ppo.cli.cluster_files.sbatch import sbatch
from rl_app_ppo.config.loading import algorithm_label
from rl_app_ppo.config.schema import AppConfig
from rl_ckpt_engine import PluginPolicy
from rl_protocol import ConfigError

JOB_FLAGS: Mapping[str, str] = {
    "--cpus": "CPUs of each host; 8 for each GPU by default",
    "--memory": "slurm, sky, kuberay: GiB of memory of each host; what the cluster gives by default",
    "--time": "slurm, kuberay: time limit as HH:MM:SS; 24:00:00 by default",
    "--gpu-type": "slurm, sky: type of GPU, for instance H100",
    "--image": "kuberay: container image with this repository in /app",
    "--volume": "kuberay: PersistentVolumeClaim that is mounted at /data, for a relative trainer.output_dir",
}
"""Flag beside --launch -> its meaning; each has one argument."""
_ONLY = {
    "--memory": ("slurm", "sky", "kuberay"),
    "--time": ("slurm", "kuberay"),
    "--gpu-type": ("slurm", "sky"),
    "--image": ("kuberay",),
    "--volume": ("kuberay",),
}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_CLAIM = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_TIME = re.compile(r"(?!0+:00:00)\d{1,4}:[0-5]\d:[0-5]\d")
"""A limit of 0 is none for SLURM, and an error for Kubernetes."""
_IMAGE = re.compile(r"[A-Za-z0-9][\w./:@-]*")
_SKY_GPUS = ("A100-80GB", "H100", "H200")
_PORT = 6379
_VOLUME = "/data"
"""Where pods mount the volume."""


def launch_text(
    kind: str, config: AppConfig, words: Sequence[str], flags: Mapping[str, str], plugins: PluginPolicy
) -> str:
    """The file or commands that start a run on a cluster.

    Args:
        kind: one of `KINDS`.
        config: the configuration of the run.
        words: the command line of the run: overrides, and `--config FILE`.
        flags: flag of `JOB_FLAGS` -> its argument.
        plugins: which plug-ins of the weight synchronization the operator allows.

    Raises:
        ConfigError: an unknown kind, a value that does not fit, or a weight engine that can't be
            loaded or does not reach all hosts; names the flag or key.
    """
    if kind not in KINDS:
        raise ConfigError(f"KIND must be one of {', '.join(KINDS)}; got {kind!r}.")
    for flag in flags:
        if kind not in _ONLY.get(flag, KINDS):
            raise ConfigError(f"{flag} has no effect with {kind}; it is for {', '.join(_ONLY[flag])}.")
    gpus = config.trainer.n_gpus_per_node
    if gpus < 0:
        raise ConfigError(
            f"A launch file needs the GPUs of each host; got trainer.n_gpus_per_node={gpus}. Set their number, or 0 for a run on CPUs."
        )
    check_engine_of_hosts(config, Facts(config, plugins).sync)
    extras = filter(None, (config.backend.extra, config.generator.extra(lambda: gpus)[0]))
    job = ClusterJob(
        name=_job_name(config.trainer.run_name) or f"rl-{algorithm_label(config)}",
        words=tuple(word for word in words if not word.startswith("ray.address=")),
        output_dir=config.trainer.output_dir,
        extras=tuple(extras),
        nodes=config.trainer.nnodes,
        gpus=gpus,
        cpus=_count("--cpus", flags.get("--cpus", str(8 * max(1, gpus)))),
        memory=_count("--memory", flags["--memory"]) if "--memory" in flags else 0,
        time=_matching("--time", flags.get("--time", "24:00:00"), _TIME, "HH:MM:SS above 0"),
        gpu_type=_matching("--gpu-type", flags["--gpu-type"], _NAME, "a name") if "--gpu-type" in flags else "",
        image=_matching("--image", flags["--image"], _IMAGE, "an image") if "--image" in flags else "",
        volume=_matching("--volume", flags["--volume"], _CLAIM, "a name in lower case, as Kubernetes has them")
        if "--volume" in flags
        else "",
    )
    return KINDS[kind](job)


def _job_name(run: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", run.lower()).strip("-")[:40].rstrip("-")


def _count(flag: str, text: str) -> int:
    if not re.fullmatch(r"[1-9]\d{0,4}", text):
        raise ConfigError(f"{flag} must be a whole number of at least 1; got {text!r}.")
    return int(text)


def _matching(flag: str, text: str, pattern: re.Pattern[str], what: str) -> str:
    if not pattern.fullmatch(text):
        raise ConfigError(f"{flag} must be {what}; got {text!r}.")
    return text


def sky(job: ClusterJob) -> str:
    """A SkyPilot task: `sky launch FILE --secret RAY_AUTH_TOKEN=...`."""
    start = f"uv run --no-sync ray start --num-cpus={job.cpus} --num-gpus={job.gpus} --disable-usage-stats --block"
    run = f"""\
set -euo pipefail
export RAY_AUTH_MODE=token{' RL_TQ_KEY="$RAY_AUTH_TOKEN" RL_CKPT_KEY="$RAY_AUTH_TOKEN"' if job.nodes > 1 else ""}
address=$(printf '%s\\n' "$SKYPILOT_NODE_IPS" | head -n 1):{_PORT}
if [ "$SKYPILOT_NODE_RANK" = 0 ]; then
  {start} --head --node-ip-address="${{address%:*}}" --port={_PORT} &
  ray=$!
  trap 'kill "$ray" 2> /dev/null || true' EXIT
fi
{AWAIT_HEAD}
if [ "$SKYPILOT_NODE_RANK" != 0 ]; then
  # it ends with the head, whose exit code is that of the run
  {start} --address="$address" || true
  exit 0
fi
{job.await_nodes(str(job.nodes))}
{job.app("${address%:*}")} "ray.address=$address"
"""
    resources: dict[str, Any] = {"cpus": f"{job.cpus}+"}
    if job.memory:
        resources["memory"] = f"{job.memory}+"
    if job.gpus:
        resources["accelerators"] = dict.fromkeys((job.gpu_type,) if job.gpu_type else _SKY_GPUS, job.gpus)
    task = {
        "name": job.name,
        "workdir": ".",
        "num_nodes": job.nodes,
        "resources": resources,
        "secrets": {"RAY_AUTH_TOKEN": None},
        "setup": f"set -e\ncommand -v uv || pip install uv\n{job.sync()}\n",
        "run": run,
    }
    return _yaml(task, 'sky launch FILE --secret RAY_AUTH_TOKEN="$(openssl rand -hex 32)"')


def kuberay(job: ClusterJob) -> str:
    """A RayJob of KubeRay 1.5: `kubectl apply -f FILE`."""
    if not job.image:
        raise ConfigError("A launch file of kuberay needs --image, a container image with this repository in /app.")
    outputs = _outputs_of_pods(job)
    limits: dict[str, Any] = {"cpu": job.cpus}
    if job.memory:
        limits["memory"] = f"{job.memory}Gi"
    if job.gpus:
        limits["nvidia.com/gpu"] = job.gpus
    volumes: list[dict[str, Any]] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}]
    if job.volume:
        volumes.append({"name": "data", "persistentVolumeClaim": {"claimName": job.volume}})
        mounts.append({"name": "data", "mountPath": _VOLUME})

    def pods(name: str) -> dict[str, Any]:
        resources = {"limits": dict(limits), "requests": dict(limits)}
        container: dict[str, Any] = {"name": name, "image": job.image, "workingDir": "/app", "resources": resources}
        if job.nodes > 1:
            key = {"secretKeyRef": {"name": f"{job.name}-key", "key": "key"}}
            container["env"] = [{"name": name, "valueFrom": deepcopy(key)} for name in ("RL_TQ_KEY", "RL_CKPT_KEY")]
        spec = {
            "containers": [{**container, "volumeMounts": [dict(mount) for mount in mounts]}],
            "volumes": deepcopy(volumes),
        }
        return {"rayStartParams": {"num-cpus": str(job.cpus)}, "template": {"spec": spec}}

    cluster: dict[str, Any] = {
        "rayVersion": version("ray"),
        "authOptions": {"mode": "token"},
        "headGroupSpec": pods("ray-head"),
    }
    if job.nodes > 1:
        count = job.nodes - 1
        replicas = {"groupName": "workers", "replicas": count, "minReplicas": count, "maxReplicas": count}
        cluster["workerGroupSpecs"] = [{**replicas, **pods("ray-worker")}]
    command = f"{job.app('$(hostname -i)')} ray.address=auto{outputs}"
    # the shell of the submitter's pod reads the entrypoint; the address is that of the head's pod
    entrypoint = f"sh -c {shlex.quote(command)}" if job.nodes > 1 else command
    spec = {
        "entrypoint": f"env --chdir=/app {entrypoint}",
        "submissionMode": "K8sJobMode",
        "shutdownAfterJobFinishes": True,
        "activeDeadlineSeconds": job.seconds,
        "backoffLimit": 0,
        "rayClusterSpec": cluster,
    }
    described = {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": {"name": job.name}, "spec": spec}
    secret = f'kubectl create secret generic {job.name}-key --from-literal=key="$(openssl rand -hex 32)" && '
    return _yaml(described, f"{secret if job.nodes > 1 else ''}kubectl apply -f FILE")


def _outputs_of_pods(job: ClusterJob) -> str:
    """A word that moves a relative trainer.output_dir to the volume, with a space before it.

    Raises:
        ConfigError: there is no volume, and the outputs would be deleted with the containers.
    """
    if PurePosixPath(job.output_dir).is_absolute():
        return ""
    if not job.volume:
        raise ConfigError(
            f"trainer.output_dir={job.output_dir} is in the containers of kuberay, which are deleted when the run ends. "
            "Set --volume to a PersistentVolumeClaim that keeps it, or trainer.output_dir to an absolute path that outlives them."
        )
    return " " + shlex.quote(f"trainer.output_dir={PurePosixPath(_VOLUME, job.output_dir)}")


def ray_job(job: ClusterJob) -> str:
    """Commands for hosts that are there: `ray start` on each, then `ray job submit`."""
    keys = " RL_TQ_KEY_FILE=~/.ray/auth_token RL_CKPT_KEY_FILE=~/.ray/auth_token" if job.nodes > 1 else ""
    token = f"export RAY_AUTH_MODE=token{keys}"
    per_host = f"--num-cpus={job.cpus} --num-gpus={job.gpus}"
    others = f"""
# On each of the {job.nodes - 1} other hosts, in the folder of this repository, with the same token in that file; HEAD is the address of the first:
{token}
{job.sync()}
uv run --no-sync ray start --address=HEAD:{_PORT} {per_host}
"""
    return f"""\
# On the first host, in the folder of this repository. Ray's processes on all hosts accept only callers with this token.
{token}
(umask 077; mkdir -p ~/.ray; test -e ~/.ray/auth_token || openssl rand -hex 32 > ~/.ray/auth_token)
{job.sync("dashboard")}
uv run --no-sync ray start --head --port={_PORT} {per_host}
{others if job.nodes > 1 else ""}
# On the first host: submit the run, and stop Ray when it has ended.
uv run --no-sync ray job submit --address=http://127.0.0.1:8265 -- env --chdir="$PWD" {job.app("$(hostname -I | cut -d ' ' -f 1)")} ray.address=auto
uv run --no-sync ray stop
"""


def _yaml(described: Mapping[str, Any], command: str) -> str:
    class Blocks(yaml.SafeDumper):
        """Writes texts of several lines as blocks."""

    def text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)

    Blocks.add_representer(str, text)
    return f"# {command}\n" + yaml.dump(dict(described), Dumper=Blocks, sort_keys=False, width=10_000)


KINDS: Mapping[str, Callable[[ClusterJob], str]] = {"slurm": sbatch, "sky": sky, "kuberay": kuberay, "ray-job": ray_job}
"""Argument of --launch -> what renders it."""
