"""Files of KV blocks: what was not written by an equal engine counts as missing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from quire.files.secret import folder_secret
from quire.types import ConfigError, TransferOrder
from quire.worker.executor import device_guard
from quire.worker.transfer.block_bytes import BlockBytes, SnapshotBytes
from quire.worker.transfer.files import BlockFiles
from quire.worker.transfer.mover import CpuCopier, LocalMover

SECRET, PRINT = b"s" * 32, b"p" * 16
KEY, OTHER = (0, b"n" * 16), (1, b"m" * 16)
BYTES = 1000


@pytest.fixture
def files(tmp_path: Path) -> Iterator[BlockFiles]:
    opened = BlockFiles(tmp_path, PRINT, SECRET, BYTES)
    yield opened
    opened.close()


@pytest.fixture
def row() -> np.ndarray:
    return np.arange(BYTES, dtype=np.uint8)


def path_of(folder: Path) -> Path:
    return folder / PRINT.hex() / f"0-{KEY[1].hex()}.kv"


def read(files: BlockFiles) -> np.ndarray | None:
    found = np.zeros(BYTES, np.uint8)
    return found if files.read(KEY, found) else None


def test_a_block_is_read_as_it_was_written(files: BlockFiles, row: np.ndarray, tmp_path: Path) -> None:
    assert read(files) is None
    assert files.write(KEY, row) and (read(files) == row).all()
    assert files.found() == [KEY] and os.stat(path_of(tmp_path)).st_mode & 0o077 == 0
    assert os.stat(path_of(tmp_path)).st_size == files.file_bytes
    files.drop(KEY)
    assert read(files) is None and files.found() == []


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def _extend(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _link(path: Path) -> None:
    moved = path.with_name("elsewhere")
    path.rename(moved)
    path.symlink_to(moved)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("damage", [_truncate, _extend, _flip, _empty, _link, _folder])
def test_a_damaged_file_counts_as_missing(damage, files: BlockFiles, row: np.ndarray, tmp_path: Path) -> None:
    files.write(KEY, row)
    damage(path_of(tmp_path))
    assert read(files) is None


@pytest.mark.parametrize(
    "secret,fingerprint,key", [(b"t" * 32, PRINT, KEY), (SECRET, b"q" * 16, KEY), (SECRET, PRINT, OTHER)]
)
def test_a_foreign_file_counts_as_missing(
    secret, fingerprint, key, files: BlockFiles, row: np.ndarray, tmp_path: Path
) -> None:
    """Of another deployment, of another model, and of another block."""
    elsewhere = BlockFiles(tmp_path / "other", fingerprint, secret, BYTES)
    elsewhere.write(key, row)
    (written,) = (tmp_path / "other" / fingerprint.hex()).glob("*.kv")
    written.rename(path_of(tmp_path))
    elsewhere.close()
    assert read(files) is None


def test_unknown_names_and_left_overs_are_ignored(row: np.ndarray, tmp_path: Path) -> None:
    first = BlockFiles(tmp_path, PRINT, SECRET, BYTES)
    first.write(KEY, row)
    first.close()
    folder = tmp_path / PRINT.hex()
    for name in ("x.kv", "0-zz.kv", f"0-{KEY[1].hex()}.part", f"a-{KEY[1].hex()}.kv", "secret"):
        (folder / name).write_bytes(b"")
    second = BlockFiles(tmp_path, PRINT, SECRET, BYTES)
    assert second.found() == [KEY] and not list(folder.glob("*.part"))
    second.close()


def test_a_folder_serves_one_engine(files: BlockFiles, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"kv_disk .* another engine"):
        BlockFiles(tmp_path, PRINT, SECRET, BYTES)


def test_a_full_disk_is_no_error(files: BlockFiles, row: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert not files.write(KEY, row)


def test_the_secret_of_a_folder_stays_and_is_private(tmp_path: Path) -> None:
    secret = folder_secret(tmp_path / "new")
    assert folder_secret(tmp_path / "new") == secret and len(secret) == 32
    (tmp_path / "new" / "secret").chmod(0o644)
    with pytest.raises(ConfigError, match="only its owner can read"):
        folder_secret(tmp_path / "new")


def run(mover: LocalMover, *orders: TransferOrder) -> dict[int, list[int]]:
    mover.start(orders)
    ends = {}
    while len(ends) < len(orders):
        mover.wait(1.0)
        ends.update(mover.ended())
    return ends


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_blocks_travel_through_all_tiers(dtype: torch.dtype, files: BlockFiles) -> None:
    """Two layers share a tensor, as layers of different groups do."""
    shared = torch.randint(0, 99, (6, 4, 5)).to(dtype)
    layers = [(shared, shared.clone() + 1), (shared,)]
    view = BlockBytes(layers)
    assert len(view.parts) == 2 and view.size == 2 * 4 * 5 * dtype.itemsize
    opened = BlockFiles(files._folder.parent, b"z" * 16, SECRET, view.size)
    mover = LocalMover(CpuCopier(view, rows=3), device_guard(torch.device("cpu")), opened)
    before = [tensor.clone() for layer in layers for tensor in layer]
    assert run(mover, TransferOrder(1, "save", [4, 2], [0, 1])) == {1: []}
    assert run(mover, TransferOrder(2, "write", [0, 1], [0, 0], [KEY, OTHER])) == {2: []}
    for layer in layers:
        for tensor in layer:
            tensor[2], tensor[4] = 0, 0
    assert run(mover, TransferOrder(3, "read", [0, 0], [2, 0], [OTHER, (7, b"?" * 16)])) == {3: [1]}
    assert run(mover, TransferOrder(4, "load", [0, 2], [4, 2])) == {4: []}
    assert torch.equal(layers[0][0][4], before[0][4]), "the row still holds what was saved"
    assert torch.equal(layers[0][0][2], before[0][2]) and torch.equal(layers[0][1][2], before[1][2])
    mover.close()


@pytest.mark.parametrize("pages", [1, 3, 7])
def test_pages_of_snapshots_travel_like_blocks(pages: int) -> None:
    blocks, parts = torch.zeros(5, 999), [torch.randn(4, 3, 5), torch.randn(4, 2).bfloat16()]
    snapshots = SnapshotBytes(parts, pages, first=5)
    assert (pages - 1) * snapshots.page_bytes < 64 <= pages * snapshots.page_bytes
    before = [part.clone() for part in parts]
    copier = CpuCopier(BlockBytes([(blocks,)]), 2 * pages, blocks[0].nbytes, snapshots)
    numbers = [5 + row * pages + page for row in (2, 0) for page in range(pages)]
    copier.begin_save(numbers, list(range(2 * pages)))()
    copier.begin_load(
        list(range(2 * pages)), [5 + row * pages + page for row in (3, 2) for page in range(pages)]
    )()
    for part, old in zip(parts, before):
        assert torch.equal(part[3], old[2]) and torch.equal(part[2], old[0])
        assert torch.equal(part[:2], old[:2])
    assert not blocks.any()


@pytest.mark.gpu
def test_blocks_and_snapshots_travel_from_a_gpu_and_back() -> None:
    from quire.worker.transfer.mover import GpuCopier

    device = torch.device("cuda")
    blocks, states = torch.randn(60, 4, 1000, device=device), torch.randn(2, 7000, device=device)
    before = blocks.clone(), states.clone()
    snapshots = SnapshotBytes([states], pages=2, first=60)
    copier = GpuCopier(
        BlockBytes([(blocks,)]), 64, blocks[0].nbytes, buffer_rows=3, device=device, snapshots=snapshots
    )
    mover = LocalMover(copier, device_guard(device))
    mover.start([TransferOrder(1, "save", list(range(64)), list(range(64))[::-1])])
    blocks.zero_()  # the next step overwrites the blocks
    states.zero_()
    assert run(mover, TransferOrder(2, "load", list(range(64))[::-1], list(range(64)))).keys() <= {1, 2}
    torch.cuda.synchronize()
    assert torch.equal(blocks, before[0]) and torch.equal(states, before[1])
    mover.close()
