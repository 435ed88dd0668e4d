"""Run compat_scenarios.py on the original TransferQueue package.

python compat_peer.py FOLDER > result.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import ray
import transfer_queue as tq

sys.path.insert(0, str(Path(__file__).parent))
import compat_scenarios

ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
tq.init()
results = {"scenarios": compat_scenarios.run(tq, Path(sys.argv[1])), "signatures": compat_scenarios.signatures(tq)}
tq.close()
ray.shutdown()
sys.stdout.write("\n" + json.dumps(results))
