"""Host memory that this process may use, under the limits of control groups and of the process.

In a container the machine's own figures are wrong: the kernel ends a process that exceeds the limit of its control
group, however much memory the machine has left. Control groups form a tree, and every group above ours limits us too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/")


@dataclass(frozen=True, slots=True)
class _Files:
    """File names of a control group's memory controller."""

    limits: tuple[str, ...]  # bytes each, or "max"
    usage: str  # bytes, page cache included
    inactive: str  # line of memory.stat: bytes of page cache that the kernel drops before it kills a process


_V1 = _Files(("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")
# Above memory.high the kernel slows the process down.
_V2 = _Files(("memory.max", "memory.high"), "memory.current", "inactive_file")


def host_memory(root: Path = _ROOT) -> tuple[int, int]:
    """Return the free and the total bytes that this process may use. `root` is the folder of /proc and /sys."""
    import psutil  # here, because a run on a GPU does not need it

    memory = psutil.virtual_memory()
    free, total = memory.available, memory.total
    for limit, used in (*_group_limits(root), *_process_limits()):
        free, total = min(free, max(limit - used, 0)), min(total, limit)
    return free, total


def _group_limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yield (limit, usage) in bytes of each control group with a limit, from our own group up to the mount."""
    for mount, group, files in _groups(root):
        while True:
            with suppress(OSError, ValueError):
                yield _limit_of(group, files), _usage_of(group, files)
            if group == mount:
                break
            group = group.parent


def _groups(root: Path) -> Iterator[tuple[Path, Path, _Files]]:
    """Yield (mount point, folder of our group, file names) for each version of control groups in use."""
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
    """Return the path of our group by controller; the key "" is the unified hierarchy (version 2)."""
    groups: dict[str, str] = {}
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        groups.update(dict.fromkeys(controllers.split(","), path))
    return groups


def _below(mount: Path, top: str, path: str) -> Path:
    """Return the folder of group `path` if `mount` shows group `top`.

    A container may see its own group as the mount although the path does not say so.
    """
    relative = Path(path.lstrip("/"))
    inner = Path(top.lstrip("/"))
    if relative.is_relative_to(inner):
        relative = relative.relative_to(inner)
    group = mount / relative
    return group if ".." not in relative.parts and group.is_dir() else mount


def _limit_of(group: Path, files: _Files) -> int:
    """Return the limit of a group in bytes. Raise ValueError if it has none."""
    texts = [(group / name).read_text().strip() for name in files.limits if (group / name).exists()]
    return min(int(text) for text in texts if text != "max")


def _usage_of(group: Path, files: _Files) -> int:
    """Return the bytes that a group uses, without the page cache that the kernel drops first."""
    stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    return int((group / files.usage).read_text()) - int(stat.get(files.inactive, 0))


def _process_limits() -> Iterator[tuple[int, int]]:
    """Yield (limit, usage) in bytes of address space and data (`ulimit -v`, `ulimit -d`), as far as limited."""
    with suppress(ImportError, OSError):  # Windows has no such module, macOS no /proc
        import resource

        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        for limit, used in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
            if (soft := resource.getrlimit(limit)[0]) != resource.RLIM_INFINITY:
                yield soft, 1024 * int(status[used].split()[0])
