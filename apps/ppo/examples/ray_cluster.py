"""Train on a Ray cluster that runs already: python ray_cluster.py ADDRESS [KEY=VALUE]...

    ray start --head                     # on one host; ray start --address=... on the others
    python ray_cluster.py auto

The hosts share the output folder and have the same environment. With several hosts set
`trainer.nnodes`, `trainer.n_gpus_per_node`, `transfer_queue.listen` and a weight engine that works
across hosts; `rl launch` writes files for SLURM, SkyPilot and Kubernetes that do so.
"""

import sys

from rl_app_ppo import train

address, *settings = sys.argv[1:]
result = train(
    options=settings,
    ray={"address": address},
    checkpoint_engine={"backend": "tcp"},
    placement="separate",
    trainer={"total_training_steps": 2, "run_name": "cluster"},
    quiet=True,
)
for step in result.history:
    print("step", step["step"], "driver", step.get("perf/driver_bytes", 0), "bytes")
print(result.model)
