"""The host's memory as far as this process may use it: limits of control groups and of the process count.

In a container the machine's own figures are no use: the kernel ends a process that exceeds its control group's
limit, however much the machine has left. Groups form a tree, and each one above ours limits us as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/")


@dataclass(frozen=True, slots=True)
class _Files:
    """Names of a control group's files."""

    limits: tuple[str, ...]  # bytes each, or "max"
    usage: str  # bytes, page cache included
    inactive: str  # line of memory.stat: bytes of page cache that is dropped before anything is killed


_V1 = _Files(("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Files(
    ("memory.max", "memory.high"), "memory.current", "inactive_file"
)  # above high, we are slowed down


def host_memory(root: Path = _ROOT) -> tuple[int, int]:
    """(free, total) bytes that this process may use. `root` is where /proc and /sys are."""
    import psutil  # here: a run on a GPU needs none

    memory = psutil.virtual_memory()
    free, total = memory.available, memory.total
    for limit, used in (*_group_limits(root), *_process_limits()):
        free, total = min(free, max(limit - used, 0)), min(total, limit)
    return free, total


def _group_limits(root: Path) -> Iterator[tuple[int, int]]:
    """(limit, usage) in bytes of each control group that holds this process, from its own up to the mount."""
    for mount, group, files in _groups(root):
        while True:
            with suppress(OSError, ValueError):
                yield _limit_of(group, files), _usage_of(group, files)
            if group == mount:
                break
            group = group.parent


def _groups(root: Path) -> Iterator[tuple[Path, Path, _Files]]:
    """(where the tree is mounted, our own group below it, its files) for each version in use."""
    with suppress(OSError):
        own = _own_groups((root / "proc/self/cgroup").read_text())
        for line in (root / "proc/self/mountinfo").read_text().splitlines():
            before, _, after = line.partition(" - ")
            kind, _, options = (after.split() + ["", "", ""])[:3]
            if kind == "cgroup2":
                name, files = "", _V2
            elif kind == "cgroup" and "memory" in options.split(","):
                name, files = "memory", _V1
            else:
                continue
            if name in own:
                top, mounted_at = before.split()[3:5]
                mount = root / mounted_at.lstrip("/")
                yield mount, _below(mount, top, own[name]), files


def _own_groups(text: str) -> dict[str, str]:
    """Path of our group by controller; "" is the unified hierarchy (version 2)."""
    groups: dict[str, str] = {}
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        groups.update(dict.fromkeys(controllers.split(","), path))
    return groups


def _below(mount: Path, top: str, path: str) -> Path:
    """The folder of group `path`, where `top` is the group that is mounted. A container may see its own group as
    the mount without the path saying so."""
    relative = Path(path.lstrip("/"))
    inner = Path(top.lstrip("/"))
    if relative.is_relative_to(inner):
        relative = relative.relative_to(inner)
    group = mount / relative
    return group if ".." not in relative.parts and group.is_dir() else mount


def _limit_of(group: Path, files: _Files) -> int:
    """Raises ValueError where there is no limit."""
    texts = [(group / name).read_text().strip() for name in files.limits if (group / name).exists()]
    return min(int(text) for text in texts if text != "max")


def _usage_of(group: Path, files: _Files) -> int:
    """Without page cache that is given up first."""
    stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    return int((group / files.usage).read_text()) - int(stat.get(files.inactive, 0))


def _process_limits() -> Iterator[tuple[int, int]]:
    """(limit, usage) in bytes of address space and data (`ulimit -v`, `ulimit -d`)."""
    with suppress(ImportError, OSError):  # Windows has none, macOS no /proc
        import resource

        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        for limit, used in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
            if (soft := resource.getrlimit(limit)[0]) != resource.RLIM_INFINITY:
                yield soft, 1024 * int(status[used].split()[0])
