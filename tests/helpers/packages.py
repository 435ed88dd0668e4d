"""The import packages of the workspace."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {path.name: path for pattern in ("packages/*/src/*", "apps/*/src/*") for path in sorted(ROOT.glob(pattern))}
"""Import name -> folder of the sources."""
