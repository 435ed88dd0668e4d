"""An sbatch file that starts Ray on the hosts of an allocation, and the run on the first."""

from __future__ import annotations

from rl_app_ppo.cli.cluster_files.cluster_job import AWAIT_HEAD, ClusterJob


def sbatch(job: ClusterJob) -> str:
    """The file for `sbatch FILE`, in the folder of this repository.

    The allocation ends with the run, or as soon as Ray ends on any host.
    """
    several = 'export RL_TQ_KEY_FILE="$RAY_AUTH_TOKEN_PATH" RL_CKPT_KEY_FILE="$RAY_AUTH_TOKEN_PATH"\n'
    keys = several if job.nodes > 1 else ""
    kind = f"{job.gpu_type}:" if job.gpu_type else ""
    gpus = f"#SBATCH --gpus-per-node={kind}{job.gpus}\n" if job.gpus else ""
    memory = f"#SBATCH --mem={job.memory}G\n" if job.memory else ""
    ray = f"uv run --no-sync ray start --num-cpus={job.cpus} --num-gpus={job.gpus} --disable-usage-stats --block"
    return f"""\
#!/bin/bash
#SBATCH --job-name={job.name}
#SBATCH --nodes={job.nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task={job.cpus}
{memory}{gpus}#SBATCH --time={job.time}
#SBATCH --output=slurm-%j.out
# Run `sbatch FILE` in the folder of this repository, which all hosts share.
set -euo pipefail
cd "$SLURM_SUBMIT_DIR"
{job.sync()}

# Ray's processes, and those that listen for other hosts, accept only callers with this token.
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$PWD/.ray-token-$SLURM_JOB_ID"
{keys}components=()
end() {{
  rm -f "$RAY_AUTH_TOKEN_PATH"
  for pid in "${{components[@]}}"; do kill "$pid" 2> /dev/null || true; done
}}
trap end EXIT
(umask 077; od -An -N32 -tx1 /dev/urandom | tr -d ' \\n' > "$RAY_AUTH_TOKEN_PATH")

mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
ip=$(hostname -I | cut -d ' ' -f 1)
address=$ip:$((20000 + SLURM_JOB_ID % 20000))

# start HOST COMMAND...: one component of the job, on a host; srun does not inherit --cpus-per-task
start() {{
  srun --overlap --nodes=1 --ntasks=1 --cpus-per-task={job.cpus} --nodelist="$1" "${{@:2}}" &
  components+=("$!")
}}

start "${{hosts[0]}}" {ray} --head --node-ip-address="$ip" --port="${{address##*:}}"
SECONDS=0
{AWAIT_HEAD}
for host in "${{hosts[@]:1}}"; do
  start "$host" {ray} --address="$address"
done
{job.await_nodes('"${#hosts[@]}"')}

start "${{hosts[0]}}" {job.app("$ip")} "ray.address=$address"
run=${{components[-1]}}
while kill -0 "$run" 2> /dev/null; do
  for pid in "${{components[@]}}"; do
    if [ "$pid" = "$run" ] || kill -0 "$pid" 2> /dev/null; then continue; fi
    status=0
    wait "$pid" || status=$?
    echo "error: Ray ended on a host with exit code $status, and the run with it; see the output of ray start above" >&2
    exit 1
  done
  sleep 1
done
status=0
wait "$run" || status=$?
exit "$status"
"""
