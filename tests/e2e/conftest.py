from __future__ import annotations

from processes import no_process_is_left, no_process_of_the_module_is_left  # noqa: F401
