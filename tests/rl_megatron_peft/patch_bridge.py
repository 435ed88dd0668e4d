"""Makes Megatron-Bridge 0.3.1 run in this environment without Transformer Engine and without GPUs: python patch_bridge.py

No release of it can be imported without Transformer Engine, which is used by its own LoRA layers alone, and 0.3.1 scatters views with gaps
over gloo, which sends the wrong memory without an error (corrected in 0.4.2). Three of its files are replaced by copies with the edits below,
the second time nothing is done. Another version is refused: look at what it needs, and delete what it no longer does.
"""

from __future__ import annotations

import sys
from importlib.metadata import distribution
from pathlib import Path

VERSION = "0.3.1"
IMPORT = "import transformer_engine.pytorch as te\n"
SAFE_IMPORT = "from megatron.bridge.utils.import_utils import safe_import\n"
OPTIONAL = '\nte, HAVE_TE = safe_import("transformer_engine.pytorch")\n'
EDITS = {
    "peft/lora.py": [
        (IMPORT, ""),
        (
            "\nlogger = logging.getLogger(__name__)\n",
            f"{SAFE_IMPORT}\nlogger = logging.getLogger(__name__)\n{OPTIONAL}",
        ),
    ],
    "peft/lora_layers.py": [
        ("import math\n", "from __future__ import annotations\n\nimport math\n"),
        (IMPORT, ""),
        (SAFE_IMPORT, SAFE_IMPORT + OPTIONAL),
        ("class TELinearAdapter(te.Linear):", "class TELinearAdapter(te.Linear if HAVE_TE else nn.Module):"),
    ],
    "models/conversion/param_mapping.py": [
        (
            "scatter_list = [s.to(device=device, dtype=dtype) for s in splits]",
            "scatter_list = [s.to(device=device, dtype=dtype).contiguous() for s in splits]",
        )
    ],
}
"""File -> (what it says, what it is to say)."""


def main() -> None:
    installed = distribution("megatron-bridge")
    if installed.version != VERSION:
        sys.exit(f"megatron-bridge {installed.version} is installed; these edits are for {VERSION}.")
    for name, edits in EDITS.items():
        file = Path(str(installed.locate_file("megatron/bridge"))) / name
        text = file.read_text()
        if all(new in text for _, new in edits if new):
            continue
        for old, new in edits:
            if text.count(old) != 1:
                sys.exit(f"{file} has {old!r} {text.count(old)} times, expected once.")
            text = text.replace(old, new)
        scratch = file.with_suffix(".patched")  # a file of its own: an installer may share the first with its cache
        scratch.write_text(text)
        scratch.replace(file)


if __name__ == "__main__":
    main()
