"""Patch Megatron-Bridge 0.3.1 to run without Transformer Engine and GPUs.

Usage: python patch_bridge.py. No release can be imported without Transformer Engine, which only its
own LoRA layers use. 0.3.1 also scatters non-contiguous views over gloo, which silently sends the
wrong memory (fixed in 0.4.2). The script replaces three files with edited copies; a second run
changes nothing. It refuses other versions: check which edits they still need.
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
"""File -> (old text, new text) pairs."""


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
        # Replace the file, because an installer's cache may share the old one.
        scratch = file.with_suffix(".patched")
        scratch.write_text(text)
        scratch.replace(file)


if __name__ == "__main__":
    main()
