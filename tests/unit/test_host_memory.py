"""Host memory under the limits of control groups, versions 1 and 2, and of the process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from quire.worker.memory.host_memory import host_memory

MIB = 1 << 20


def machine(root: Path, own: str, mounts: str) -> Path:
    proc = root / "proc" / "self"
    proc.mkdir(parents=True)
    (proc / "cgroup").write_text(own)
    (proc / "mountinfo").write_text(mounts)
    return root


def group(folder: Path, **files: int | str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / name.replace("__", ".")).write_text(f"{value}\n")


def v2(root: Path, path: str, top: str = "/") -> Path:
    mounts = f"30 1 0:26 {top} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
    machine(root, f"0::{path}\n", mounts)
    return root / "sys/fs/cgroup"


def stat(inactive: int) -> str:
    return f"anon 5\ninactive_file {inactive}\nactive_file 7"


def test_without_limits_it_is_the_machine(tmp_path: Path) -> None:
    top = v2(tmp_path, "/user.slice")
    group(top / "user.slice", memory__max="max", memory__high="max", memory__current=9, memory__stat=stat(0))
    (free, total), plain = host_memory(tmp_path), host_memory(tmp_path / "nothing there")
    assert total == plain[1] and abs(free - plain[0]) < 1 << 30


def test_version_2(tmp_path: Path) -> None:
    top = v2(tmp_path, "/pod/app")
    group(top / "pod" / "app", memory__max="max", memory__high="max", memory__current=0, memory__stat=stat(0))
    group(
        top / "pod", memory__max=300 * MIB, memory__high="max", memory__current=120 * MIB,
        memory__stat=stat(20 * MIB),
    )  # fmt: skip
    assert host_memory(tmp_path) == (200 * MIB, 300 * MIB)  # page cache that would be dropped counts as free


def test_the_tightest_group_counts(tmp_path: Path) -> None:
    top = v2(tmp_path, "/pod/app")
    group(
        top / "pod/app", memory__max=400 * MIB, memory__high=100 * MIB, memory__current=MIB,
        memory__stat=stat(0),
    )  # fmt: skip
    group(
        top / "pod", memory__max=300 * MIB, memory__high="max", memory__current=290 * MIB,
        memory__stat=stat(0),
    )  # fmt: skip
    assert host_memory(tmp_path) == (10 * MIB, 100 * MIB)


def test_version_1(tmp_path: Path) -> None:
    mounts = (
        "32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
        "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
    )
    machine(tmp_path, "4:memory:/docker/abc\n1:cpu:/other\n0::/\n", mounts)
    top = tmp_path / "sys/fs/cgroup/memory"
    group(
        top / "docker/abc", memory__limit_in_bytes=256 * MIB, memory__usage_in_bytes=100 * MIB,
        memory__stat=f"inactive_file 1\ntotal_inactive_file {50 * MIB}",
    )  # fmt: skip
    group(
        top / "docker", memory__limit_in_bytes=2**63 - 4096, memory__usage_in_bytes=5,
        memory__stat="total_inactive_file 0",
    )  # fmt: skip
    assert host_memory(tmp_path) == (206 * MIB, 256 * MIB)


def test_a_container_whose_own_group_is_the_mount(tmp_path: Path) -> None:
    """Docker without a cgroup namespace: the path is the host's, but the mount is our own group."""
    top = v2(tmp_path, "/docker/abc", top="/docker/abc")
    group(top, memory__max=64 * MIB, memory__high="max", memory__current=0, memory__stat=stat(0))
    assert host_memory(tmp_path) == (64 * MIB, 64 * MIB)


def test_a_group_above_its_namespace_is_not_left(tmp_path: Path) -> None:
    top = v2(tmp_path, "/../../other")
    group(top, memory__max=64 * MIB, memory__high="max", memory__current=0, memory__stat=stat(0))
    assert host_memory(tmp_path)[1] == 64 * MIB


@pytest.mark.skipif(sys.platform != "linux", reason="limits of Linux")
def test_ulimit() -> None:
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30)); "
        "from quire.worker.memory.host_memory import host_memory; free, total = host_memory(); "
        "assert total <= 2 << 30 and free < total, (free, total)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
