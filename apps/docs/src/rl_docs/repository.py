"""Where things are in the repository."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[4]
CONFIG_FILE = ROOT / "apps" / "docs" / "mkdocs.yml"
SOURCES = sorted(path for pattern in ("packages/*/src", "apps/ppo/src") for path in ROOT.glob(pattern))
