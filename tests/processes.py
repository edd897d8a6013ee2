"""Processes that tests start, found by a mark in their environment: also those whose parent has ended."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Iterator

import psutil
import pytest

MODULE_MARK, TEST_MARK = "QUIRE_TEST_MODULE", "QUIRE_TEST_NAME"
# Modules of processes that no test may leave, even if a fixture keeps an engine in this process for other tests.
_OF_ENGINES = ("quire.rank_process", "quire.engine_process")
_PATIENCE_S = 15.0  # a process that has lost its parent may be short of processor time


def marked(mark: str, value: str, modules: tuple[str, ...] = ()) -> list[psutil.Process]:
    """Return the running processes that were started while the variable `mark` had this value.

    Args:
        mark: name of an environment variable.
        value: its value.
        modules: of Python, one of which a process must run; empty allows all.
    """
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(mark) == value and (
                not modules or not set(modules).isdisjoint(process.cmdline())
            ):
                found.append(process)
    return found


def await_end(mark: str, value: str, modules: tuple[str, ...] = ()) -> list[str]:
    """Wait until no marked process is left. Return the command lines of those that stay, after ending them."""
    end_s = time.monotonic() + _PATIENCE_S
    while found := marked(mark, value, modules):
        if time.monotonic() > end_s:
            break
        gc.collect()  # an engine in a cycle of references ends with its collection
        psutil.wait_procs(found, timeout=0.1)
    left = []
    for process in found:
        with contextlib.suppress(psutil.Error):
            left.append(" ".join(process.cmdline()))
            process.kill()
    return left


def _none_left(mark: str, node: pytest.Item, modules: tuple[str, ...]) -> Iterator[None]:
    value = f"{os.getpid()} {node.nodeid}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(mark, value)
        yield
    left = await_end(mark, value, modules)
    assert not left, f"{node.nodeid} leaves processes behind: {left}"


@pytest.fixture(scope="module", autouse=True)
def no_process_of_the_module_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Check that all processes of a test module have ended with it."""
    yield from _none_left(MODULE_MARK, request.node, ())


@pytest.fixture
def no_process_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Check that all ranks and engine processes that a test has started have ended with it."""
    yield from _none_left(TEST_MARK, request.node, _OF_ENGINES)
