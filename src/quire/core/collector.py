"""The settings of Python's garbage collector in a process with an engine."""

from __future__ import annotations

import gc

# New containers before the collector looks at them. A step of a full batch makes a few for each row, which are gone before
# the next step; with Python's 700 the collector looked at them once a step, for up to a tenth of its host time.
_YOUNG_OBJECTS = 5000


def settle() -> None:
    """Exclude all existing objects from garbage collection, because they live as long as the engine.

    New ones are looked at less often than by default.
    """
    gc.collect()
    gc.freeze()
    young, *older = gc.get_threshold()
    if young:  # otherwise the process does without
        gc.set_threshold(max(young, _YOUNG_OBJECTS), *older)
