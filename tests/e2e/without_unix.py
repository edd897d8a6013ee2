"""Python without the modules, functions and sockets that Windows lacks.

As a command it runs a module that way: python without_unix.py MODULE ARGUMENTS
"""

from __future__ import annotations

import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

UNIX_MODULES = {"fcntl", "grp", "pwd", "readline", "resource", "termios", "triton", "uvloop"}
UNIX_NAMES: dict[Any, list[str]] = {
    os: ["fork", "nice", "getuid", "geteuid", "getgid", "getpgid", "killpg", "pread", "preadv", "setsid", "uname"]
    + ["sysconf"],
    select: ["poll", "epoll"],
    signal: ["SIGALRM", "SIGHUP", "SIGKILL", "SIGPROF", "SIGUSR1", "SIGUSR2", "setitimer", "alarm", "pthread_sigmask"]
    + ["ITIMER_PROF"],
    socket: ["AF_UNIX", "SO_REUSEPORT"],
}  # fmt: skip
_SIGKILL = signal.SIGKILL


class WindowsPopen(subprocess.Popen[bytes]):
    """`subprocess.Popen` as on Windows: `kill` needs no signal, and a Python module runs without Unix, too."""

    def __init__(self, command: list[str], **options: Any) -> None:
        if command[:2] == [sys.executable, "-m"]:
            command = [sys.executable, str(Path(__file__)), *command[2:]]
        super().__init__(command, **options)

    def kill(self) -> None:
        """Kill the process, as TerminateProcess does."""
        if self.poll() is None:
            os.kill(self.pid, _SIGKILL)


def remove_unix() -> None:
    """Remove what only Unix has from this process and from the Python modules that it starts."""
    for module in [name for name in sys.modules if name.partition(".")[0] in UNIX_MODULES]:
        del sys.modules[module]
    sys.modules |= dict.fromkeys(UNIX_MODULES)  # None makes an import raise ModuleNotFoundError
    for module, names in UNIX_NAMES.items():
        for name in names:
            vars(module).pop(name, None)
    vars(subprocess)["Popen"] = WindowsPopen


if __name__ == "__main__":
    remove_unix()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
