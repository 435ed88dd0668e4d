"""The container images, without building them."""

from __future__ import annotations

import os
import re
import subprocess
import sys

from packages import ROOT


def test_what_is_compiled_on_gpus_is_written_where_any_user_can_write():
    text = (ROOT / "containers" / "cuda.Containerfile").read_text()
    (names,) = re.findall(r"^ENV (VLLM_CACHE_ROOT=.*)$", text, re.MULTILINE)
    settings = dict(name.split("=") for name in names.split())
    assert sorted(settings) == ["FLASHINFER_WORKSPACE_BASE", "TRITON_HOME", "VLLM_CACHE_ROOT"]
    environment = {"PATH": os.environ["PATH"], "HOME": "/", **settings}
    program = "from triton import knobs; print(knobs.cache.dir)"
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    for folder in (*settings.values(), done.stdout.strip()):
        assert folder.startswith("/tmp"), "docs/cluster.md: the images need no other folder"
