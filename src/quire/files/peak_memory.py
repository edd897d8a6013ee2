"""The largest memory that this process has had: `peak_bytes`."""

from __future__ import annotations

import sys
from pathlib import Path


def peak_bytes() -> int | None:
    """Return the largest resident memory that this process has had, in bytes, or None where it is not known.

    On Linux the peak is read from /proc/self/status, because `ru_maxrss` of a process is at least that of its parent at
    the start.
    """
    try:
        status = Path("/proc/self/status").read_text()
        return int(status.partition("VmHWM:")[2].split(maxsplit=1)[0]) << 10
    except (OSError, IndexError, ValueError):
        pass
    try:
        import resource
    except ImportError:  # not on Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10
