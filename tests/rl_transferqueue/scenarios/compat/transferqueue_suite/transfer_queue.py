"""Makes `transfer_queue` an alias of `rl_transferqueue.compat`.

With this folder first on the path, `import transfer_queue.x` imports `rl_transferqueue.compat.x`.
Ray workers inherit PYTHONPATH, so the alias exists in them too.
"""

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
        module.__spec__ = spec.loader_state  # the import system has replaced it


sys.meta_path.insert(0, _Alias())
sys.modules[__name__] = importlib.import_module(OURS)
