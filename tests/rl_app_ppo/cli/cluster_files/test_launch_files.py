"""`--launch`: files for clusters are valid, quote every value, and end when a part of them does."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest
import yaml

from rl_app_ppo.cli.main import main

PRESET = ("preset=math-qwen2.5-7b-8gpu", 'trainer.run_name=O\'Neill $(touch hacked) "x"', "model.path=/my models/é'`x`")
KINDS = {"slurm": (), "sky": (), "kuberay": ("--image", "registry/rl:1", "--volume", "claim"), "ray-job": ()}
FAKES = {
    "uv": """
case "$*" in
  sync*|*"run --no-sync python"*) cat > /dev/null < /dev/null; exit 0 ;;
  *apps/ppo*) printf '%s\\n' "$@" > "$TRACES/app"; exec "$PYTHON" -c "$SLEEP" "$APP_S" "$APP_CODE" ;;
  *--head*)
    echo $$ > "$TRACES/head"
    exec "$PYTHON" -c "
import socket, sys, time
server = socket.create_server(('127.0.0.1', int(sys.argv[1])))
time.sleep(60)" "$(printf '%s\\n' "$@" | sed -n 's/^--port=//p')" ;;
  *"ray start"*) echo $$ > "$TRACES/worker"; exec "$PYTHON" -c "$SLEEP" "$WORKER_S" 3 ;;
esac
exit 99
""",
    "srun": 'case "$*" in *--cpus-per-task=[1-9]*) ;; *) exit 9 ;; esac  # a step of one CPU\n'
    'for word; do case "$word" in --*) shift ;; *) break ;; esac; done\nexec "$@"\n',
    "scontrol": "printf 'a1\\na2\\n'\n",
    "hostname": "echo 127.0.0.1 10.0.0.1\n",
}
"""Programs of a cluster -> what stands for them here."""


def rendered(capsys, kind, *words):
    assert main(["--launch", kind, *KINDS[kind], *(words or PRESET)]) == 0
    return capsys.readouterr().out


def checked_script(text, tmp_path):
    """A path of a shell script that bash and, where it is installed, shellcheck accept."""
    script = tmp_path / "script.sh"
    script.write_text(text)
    subprocess.run(["bash", "-n", script], check=True)
    if shellcheck := shutil.which("shellcheck"):
        subprocess.run([shellcheck, "--shell=bash", script], check=True)
    return script


@pytest.fixture
def run_sbatch(tmp_path, capsys):
    """Run the script of --launch slurm with stand-ins; returns exit code, errors, and traces."""
    programs, traces, folder = tmp_path / "bin", tmp_path / "traces", tmp_path / "repository"
    for path in (programs, traces, folder):
        path.mkdir()
    for name, body in FAKES.items():
        (programs / name).write_text(f"#!/bin/bash\n{body}")
        (programs / name).chmod(0o755)

    def run(app_s=0.0, app_code=0, worker_s=60.0):
        script = checked_script(rendered(capsys, "slurm"), tmp_path)
        job = os.getpid() * 7 % 20000
        settings = {
            "PATH": f"{programs}:{os.environ['PATH']}", "TRACES": traces, "PYTHON": sys.executable,
            "SLEEP": "import sys, time; time.sleep(float(sys.argv[1])); sys.exit(int(sys.argv[2]))",
            "APP_S": app_s, "APP_CODE": app_code, "WORKER_S": worker_s,
            "SLURM_SUBMIT_DIR": folder, "SLURM_JOB_ID": job, "SLURM_JOB_NODELIST": "a[1-2]",
        }  # fmt: skip
        ended = subprocess.run(
            ["bash", script], env={**os.environ, **{name: str(value) for name, value in settings.items()}},
            capture_output=True, text=True, timeout=50, check=False,
        )  # fmt: skip
        return ended.returncode, ended.stderr, traces, folder

    return run


def alive(trace):
    """Whether the process whose id is in a file still runs; waits a moment for its end."""
    pid = int(trace.read_text())
    for _ in range(100):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        subprocess.run(["sleep", "0.05"], check=True)
    return True


@pytest.mark.parametrize("code", [0, 7])
def test_the_sbatch_script_ends_with_the_exit_code_of_the_run_and_stops_ray(run_sbatch, code):
    ended, errors, traces, folder = run_sbatch(app_code=code)
    assert (ended, "error" in errors) == (code, False), errors
    words = (traces / "app").read_text().splitlines()
    assert words[:3] == ["run", "--no-sync", "apps/ppo"]
    assert words[3:-1] == list(PRESET), "each value arrives as it was given"
    assert re.fullmatch(r"ray\.address=127\.0\.0\.1:\d+", words[-1])
    assert not alive(traces / "head")
    assert not alive(traces / "worker")
    assert list(folder.iterdir()) == [], "the token is gone, and no value was run as a command"


def test_a_dead_ray_process_ends_the_allocation(run_sbatch):
    ended, errors, traces, _ = run_sbatch(app_s=60, worker_s=0.5)
    assert ended == 1
    assert "error: Ray ended on a host with exit code 3, and the run with it" in errors
    assert not alive(traces / "head")


def test_sizes_come_from_the_configuration_and_from_flags(capsys, tmp_path):
    given = ("trainer.nnodes=2", "--cpus", "96", "--time", "100:30:00", "--gpu-type", "h100")
    text = rendered(capsys, "slurm", *given, *PRESET)
    wanted = {
        "nodes": "2",
        "cpus-per-task": "96",
        "time": "100:30:00",
        "gpus-per-node": "h100:8",
        "ntasks-per-node": "1",
    }
    directives = dict(re.findall(r"^#SBATCH --([\w-]+)=(.*)$", text, flags=re.MULTILINE))
    assert wanted.items() <= directives.items()
    assert directives["job-name"] == "o-neill-touch-hacked-x"
    assert "uv sync --locked --extra=vllm\n" in text
    on_cpu = rendered(capsys, "slurm", "trainer.n_gpus_per_node=0", "ray.address=auto")
    assert "--gpus-per-node" not in on_cpu
    assert "--num-gpus=0" in on_cpu
    assert "ray.address=auto" not in on_cpu


def test_a_sky_task_has_what_skypilot_requires(capsys, tmp_path):
    text = rendered(capsys, "sky", "trainer.nnodes=2", *PRESET)
    task = yaml.safe_load(text)
    assert set(task) == {"name", "workdir", "num_nodes", "resources", "secrets", "setup", "run"}
    assert (task["num_nodes"], task["resources"]["accelerators"]["H100"]) == (2, 8)
    assert task["secrets"] == {"RAY_AUTH_TOKEN": None}
    checked_script(task["run"], tmp_path)
    checked_script(task["setup"], tmp_path)
    (line,) = [line for line in task["run"].splitlines() if "apps/ppo" in line]
    listen = "transfer_queue.listen=${address%:*}"
    assert shlex.split(line)[4:] == ["trainer.nnodes=2", *PRESET, listen, "ray.address=$address"]
    typed = yaml.safe_load(rendered(capsys, "sky", "--gpu-type", "L4", *PRESET))
    assert typed["resources"]["accelerators"] == {"L4": 8}


def test_a_ray_job_of_kuberay_has_what_kuberay_requires(capsys):
    job = yaml.safe_load(rendered(capsys, "kuberay", "trainer.nnodes=3", "--time", "02:00:01", *PRESET))
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", job["metadata"]["name"])
    spec = job["spec"]
    assert (spec["activeDeadlineSeconds"], spec["shutdownAfterJobFinishes"]) == (7201, True)
    cluster = spec["rayClusterSpec"]
    (workers,) = cluster["workerGroupSpecs"]
    assert workers["replicas"] == workers["minReplicas"] == workers["maxReplicas"] == 2
    assert cluster["authOptions"] == {"mode": "token"}
    for group in (cluster["headGroupSpec"], workers):
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        assert container["image"] == "registry/rl:1"
        assert (
            container["resources"]["limits"] == container["resources"]["requests"] == {"cpu": 64, "nvidia.com/gpu": 8}
        )
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
        assert pod["volumes"][1]["persistentVolumeClaim"] == {"claimName": "claim"}
    assert "workerGroupSpecs" not in yaml.safe_load(rendered(capsys, "kuberay"))["spec"]["rayClusterSpec"]


def test_memory_of_each_host_is_asked_for_where_it_is_given(capsys):
    given = ("--memory", "480", *PRESET)
    assert "\n#SBATCH --mem=480G\n" in rendered(capsys, "slurm", *given)
    assert yaml.safe_load(rendered(capsys, "sky", *given))["resources"]["memory"] == "480+"
    pods = yaml.safe_load(rendered(capsys, "kuberay", *given))["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]
    wanted = {"cpu": 64, "memory": "480Gi", "nvidia.com/gpu": 8}
    assert pods["spec"]["containers"][0]["resources"] == {"limits": wanted, "requests": wanted}
    assert "--mem" not in rendered(capsys, "slurm")
    assert "memory" not in yaml.safe_load(rendered(capsys, "sky"))["resources"]


@pytest.mark.parametrize("hosts", [1, 3])
def test_kuberay_runs_the_command_with_the_address_of_the_head(capsys, tmp_path, hosts):
    """A shell of the submitter's pod reads the entrypoint, then one of the head's pod."""
    job = yaml.safe_load(rendered(capsys, "kuberay", f"trainer.nnodes={hosts}", *PRESET))
    fakes = {"env": 'shift; exec "$@"', "hostname": 'echo "$POD"', "uv": 'printf "%s\\0" "$@" > "$TRACE"'}
    for name, body in fakes.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    settings = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "TRACE": str(tmp_path / "trace")}
    submit = f"printf '%s\\0' {job['spec']['entrypoint']} ;"
    printed = subprocess.run(
        ["bash", "-ec", submit], env={**settings, "POD": "submitter"}, capture_output=True, text=True, check=True
    ).stdout
    on_head = shlex.join(printed.split("\0")[:-1])  # as `ray job submit` does
    subprocess.run(["sh", "-c", on_head], env={**settings, "POD": "head"}, check=True)
    words = (tmp_path / "trace").read_text().split("\0")[:-1]
    listen = ["transfer_queue.listen=head"] if hosts > 1 else []
    assert words[:3] == ["run", "--no-sync", "apps/ppo"]
    outputs = "trainer.output_dir=/data/outputs"
    assert words[3:] == [f"trainer.nnodes={hosts}", *PRESET, *listen, "ray.address=auto", outputs]


def test_outputs_of_kuberay_outlive_its_containers(capsys):
    def entrypoint(folder):
        return yaml.safe_load(rendered(capsys, "kuberay", f"trainer.output_dir={folder}", *PRESET))["spec"][
            "entrypoint"
        ]

    assert shlex.split(entrypoint("my runs"))[-2:] == ["ray.address=auto", "trainer.output_dir=/data/my runs"]
    assert shlex.split(entrypoint("/mnt/runs"))[-1] == "ray.address=auto"


def test_the_commands_for_hosts_that_are_there(capsys, tmp_path):
    text = rendered(capsys, "ray-job", "trainer.nnodes=2", *PRESET)
    checked_script(text, tmp_path)
    (line,) = [line for line in text.splitlines() if "ray job submit" in line]
    words = shlex.split(line)
    listen = "transfer_queue.listen=$(hostname -I | cut -d ' ' -f 1)"
    assert words[words.index("apps/ppo") + 1 :] == ["trainer.nnodes=2", *PRESET, listen, "ray.address=auto"]
    assert "uv sync --locked --extra=vllm --group=dashboard\n" in text, "the head takes jobs"
    assert "pip install" not in text, "what is installed is locked"
    assert "ray start --address=HEAD:6379 --num-cpus=64 --num-gpus=8" in text
    assert "HEAD" not in rendered(capsys, "ray-job")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--launch", "pbs", PRESET[0]], "error: KIND must be one of slurm, sky, kuberay, ray-job; got 'pbs'"),
        (
            ["--launch", "slurm"],
            "error: A launch file needs the GPUs of each host; got trainer.n_gpus_per_node=-1. Set their number, or 0 for a run on CPUs",
        ),
        (["--launch", "slurm", "--cpus", "0", PRESET[0]], "--cpus must be a whole number of at least 1; got '0'"),
        (["--launch", "slurm", "--time", "1d; rm", PRESET[0]], "--time must be HH:MM:SS above 0; got '1d; rm'"),
        (["--launch", "slurm", "--time", "00:00:00", PRESET[0]], "--time must be HH:MM:SS above 0; got '00:00:00'"),
        (["--launch", "sky", "--time", "01:00:00", PRESET[0]], "--time has no effect with sky"),
        (["--launch", "ray-job", "--time", "01:00:00", PRESET[0]], "it is for slurm, kuberay"),
        (
            ["--launch", "kuberay", "--image", "x", "--volume", "My_Data", PRESET[0]],
            "--volume must be a name in lower case, as Kubernetes has them; got 'My_Data'",
        ),
        (["--launch", "sky", "--gpu-type", "a\nb", PRESET[0]], "--gpu-type must be a name"),
        (["--launch", "kuberay", PRESET[0]], "error: A launch file of kuberay needs --image"),
        (["--launch", "kuberay", "--image", "x", PRESET[0]], "which are deleted when the run ends. Set --volume"),
        (
            ["--launch", "slurm", "--memory", "0.5", PRESET[0]],
            "--memory must be a whole number of at least 1; got '0.5'",
        ),
        (["--launch", "ray-job", "--memory", "64", PRESET[0]], "it is for slurm, sky, kuberay"),
        (["--launch", "slurm", "--image", "x", PRESET[0]], "--image has no effect with slurm"),
        (
            ["--launch", "slurm", "preset=async-7b-2x8gpu", "checkpoint_engine.backend=shm"],
            "trainer.nnodes=2, but checkpoint_engine.backend=shm works within one host; set it to tcp",
        ),
        (["--cpus", "2"], "--cpus needs --launch"),
        (["--launch"], "--launch needs"),
    ],
)
def test_a_wrong_value_is_refused(capsys, words, message):
    assert main(words) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("kind", KINDS)
def test_on_two_hosts_the_data_plane_listens_and_the_weights_have_a_key(capsys, tmp_path, kind):
    text = rendered(capsys, kind, "preset=async-7b-2x8gpu")
    (line,) = [line for line in text.splitlines() if "apps/ppo" in line]
    assert re.search(r' "transfer_queue\.listen=\$[^"]+"', line)
    assert "RL_TQ_KEY" in text
    assert "RL_CKPT_KEY" in text
    if kind in ("slurm", "ray-job"):
        checked_script(text, tmp_path)
    alone = rendered(capsys, kind, PRESET[0])
    assert "RL_TQ_KEY" not in alone
    assert ".listen=" not in alone
