"""Path setup, so that the golden tests can import the test-only runner in this folder."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
