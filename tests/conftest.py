"""Tests import each other's helpers as `tests.…` and the installed raymoe, not the source tree."""

import sys
from pathlib import Path

# At the end: the source tree has no compiled module and must not hide the installed package.
sys.path.append(str(Path(__file__).parent.parent))
