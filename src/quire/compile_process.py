"""The processes that compile kernels for an engine (`compilers.py`).

The engine starts the first one as `python -m quire.compile_process FILE...`: the descriptors of one connection for each
process to be. Importing torch takes seconds, so the first process imports it, and the others are forked from it. It uses
no GPU and then has no threads, which a fork would lose. A process ends when its connection closes.

question: a job, as `kernels/compile_job.py` encodes it      answer: the error, or nothing
"""

from __future__ import annotations

import gc
import os
import sys
import threading
from multiprocessing.connection import Connection

from triton.runtime.cache import triton_key


def main(files: list[int]) -> None:
    """Fork a process for each descriptor, and wait until all have ended."""
    prepare()
    gc.freeze()  # a collection would copy the memory that the processes share
    for file in files:
        if os.fork() == 0:
            for other in files:
                if other != file:
                    os.close(other)
            _answer(Connection(file))
            os._exit(0)
    for file in files:
        os.close(file)
    for _ in files:
        os.wait()


def prepare() -> None:
    """Import and compute what all compilations need, so that the forked processes do not.

    Triton hashes its files (half a gigabyte), which needs no interpreter, while torch is imported.
    """
    hashing = threading.Thread(target=triton_key)
    hashing.start()
    import quire.kernels.compile_job  # noqa: F401  (imports torch)

    hashing.join()


def _answer(connection: Connection) -> None:
    try:
        while True:
            connection.send_bytes(_error_of(connection.recv_bytes()).encode())
    except (EOFError, OSError):  # the engine needs no more kernels, or is gone
        return


def _error_of(job: bytes) -> str:
    from quire.kernels.compile_job import run_job

    try:
        run_job(job)
    except Exception as error:  # any error of the compiler: the engine meets it again and reports it
        return f"{type(error).__name__}: {error}"
    return ""


if __name__ == "__main__":
    main([int(file) for file in sys.argv[1:]])
