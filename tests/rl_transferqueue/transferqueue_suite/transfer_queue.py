"""The package TransferQueue by name, rl_transferqueue.compat by content: with this folder first on the path, `import transfer_queue.x` is
`import rl_transferqueue.compat.x`. Ray's workers inherit PYTHONPATH, and with it this."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType

OURS = "rl_transferqueue.compat"


class _Alias(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        del path, target
        ours = OURS + name.removeprefix(__name__)
        if not name.startswith(f"{__name__}.") or importlib.util.find_spec(ours) is None:
            return None
        return importlib.machinery.ModuleSpec(name, self)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = importlib.import_module(OURS + spec.name.removeprefix(__name__))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        assert spec is not None
        module.__spec__ = spec.loader_state  # the import has put its own there


sys.meta_path.insert(0, _Alias())
sys.modules[__name__] = importlib.import_module(OURS)
