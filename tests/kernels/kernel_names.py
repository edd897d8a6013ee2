"""Print the name on disk of every function that Triton compiles, hashed in the given order.

    python tests/kernels/kernel_names.py 1|-1

Exits with 1 if a kernel uses two constants with one name and different values: Triton orders these by the addresses of
their modules, which differ between processes. test_ahead.py runs this in separate processes.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from triton.runtime.jit import JITFunction

from quire.kernels import jit

folder = Path(jit.__file__).parent
functions = {}
for path in sorted(folder.rglob("*.py")):
    parts = path.relative_to(folder).with_suffix("").parts
    if parts[0] not in ("cpu", "persistent") and parts[-1] != "__init__":
        module = importlib.import_module(".".join(("quire.kernels", *parts)))
        functions.update({f.fn: f for f in vars(module).values() if isinstance(f, JITFunction)})

names = {
    f"{f.fn.__module__}.{f.__name__}": f.cache_key for f in list(functions.values())[:: int(sys.argv[1])]
}
for place in sorted(names):
    print(place, names[place])

for function in functions.values():
    values: dict[str, str] = {}
    for (name, _), (value, _) in function.used_global_vals.items():
        if values.setdefault(name, str(value)) != str(value):
            sys.exit(f"{function.__name__} uses two constants {name}")
