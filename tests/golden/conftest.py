"""Lets the golden tests import the test-only runner beside them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
