"""An endless stream of packed rows from worker processes, in an order that depends only on the number of workers.

Worker w of W generates documents w, w + W, w + 2 W, and so on. The trainer takes one batch from each worker in turn, so
the same seeds give the same batches on any machine. No document is truncated, and none occurs twice.
"""

from __future__ import annotations

import multiprocessing as mp
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from queue import Queue
from threading import Thread

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from training.chat import END_OF_TEXT
from training.documents import training_document

ROW = 2049  # 2,048 inputs and one more target
CHUNK = 256  # documents encoded and packed together


@dataclass(slots=True)
class Batch:
    tokens: np.ndarray  # uint16 [rows, ROW]
    weights: np.ndarray  # float16 [rows, ROW], of each token as a target
    documents: np.ndarray  # uint8 [rows, ROW], number of the document inside its row


def encode(tokenizer: Tokenizer, seeds: list[int]) -> list[tuple[np.ndarray, np.ndarray]]:
    documents = [training_document(seed) for seed in seeds]
    encoded = iter(
        tokenizer.encode_batch_fast([text for d in documents for text, _ in d], add_special_tokens=False)
    )
    result = []
    for document in documents:
        ids, weights = [], []
        for _, weight in document:
            piece = next(encoded).ids
            ids += piece
            weights += [weight] * len(piece)
        weights[0] = 0.0  # nothing before the first token predicts it
        if len(ids) <= ROW:
            result.append((np.array(ids, np.uint16), np.array(weights, np.float16)))
    return result


def pack(documents: list[tuple[np.ndarray, np.ndarray]], padding: int) -> Batch:
    """Pack documents into rows by best fit, longest first, which fills about 98 % of a row."""
    rows: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(documents)), key=lambda i: -len(documents[i][0])):
        size = len(documents[i][0])
        fits = [r for r, left in enumerate(room) if left >= size]
        if fits:
            best = min(fits, key=room.__getitem__)
        else:
            best = len(rows)
            rows.append([])
            room.append(ROW)
        rows[best].append(i)
        room[best] -= size
    batch = Batch(
        np.full((len(rows), ROW), padding, np.uint16),
        np.zeros((len(rows), ROW), np.float16),
        np.full((len(rows), ROW), 255, np.uint8),
    )
    for r, members in enumerate(rows):
        at = 0
        for number, i in enumerate(members):
            ids, weights = documents[i]
            batch.tokens[r, at : at + len(ids)] = ids
            batch.weights[r, at : at + len(ids)] = weights
            batch.documents[r, at : at + len(ids)] = number
            at += len(ids)
    return batch


def rows_forever(tokenizer_file: Path, worker: int, workers: int, rows: int) -> Iterator[Batch]:
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    padding = tokenizer.token_to_id(END_OF_TEXT)
    seed, parts, have = worker, [], 0
    while True:
        packed = pack(encode(tokenizer, list(range(seed, seed + CHUNK * workers, workers))), padding)
        seed += CHUNK * workers
        # The last rows of a chunk are the emptiest; a shuffle spreads documents of one length.
        order = np.random.default_rng(seed).permutation(len(packed.tokens))
        parts.append(Batch(packed.tokens[order], packed.weights[order], packed.documents[order]))
        have += len(order)
        while have >= rows:
            whole = Batch(
                *(np.concatenate([getattr(p, f) for p in parts]) for f in ("tokens", "weights", "documents"))
            )
            yield Batch(whole.tokens[:rows], whole.weights[:rows], whole.documents[:rows])
            parts = [Batch(whole.tokens[rows:], whole.weights[rows:], whole.documents[rows:])]
            have -= rows


def _work(queue: mp.Queue[Batch], tokenizer_file: Path, worker: int, workers: int, rows: int) -> None:
    for batch in rows_forever(tokenizer_file, worker, workers, rows):
        queue.put(batch)


class Loader:
    """The batches of all worker processes, which it owns; `close` ends them.

    A thread per worker keeps two batches ready, in pinned memory for a GPU, so that neither the pipe nor the pinning
    delays the training loop.
    """

    def __init__(self, tokenizer_file: Path, workers: int, rows: int, pin: bool) -> None:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        context = mp.get_context("spawn")
        self.ready: list[Queue[tuple[Tensor, ...]]] = []
        self.processes = []
        for worker in range(workers):
            pipe, ready = context.Queue(maxsize=4), Queue[tuple[Tensor, ...]](maxsize=2)
            process = context.Process(
                target=_work, args=(pipe, tokenizer_file, worker, workers, rows), daemon=True
            )
            process.start()
            Thread(target=_receive, args=(pipe, ready, pin), daemon=True).start()
            self.ready.append(ready)
            self.processes.append(process)

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        """Yield the tokens, weights and document numbers of each batch."""
        while True:
            for ready in self.ready:
                yield ready.get(timeout=60)

    def close(self) -> None:
        for process in self.processes:
            process.terminate()


def _receive(pipe: mp.Queue[Batch], ready: Queue[tuple[Tensor, ...]], pin: bool) -> None:
    while True:
        batch = pipe.get()
        parts = (torch.from_numpy(a) for a in (batch.tokens, batch.weights, batch.documents))
        ready.put(tuple(p.pin_memory() if pin else p for p in parts))
