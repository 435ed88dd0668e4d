"""Makes this folder's helper modules importable; their names are unique in the workspace."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
