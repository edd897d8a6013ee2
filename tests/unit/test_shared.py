"""The search for blocks that rows share."""

from __future__ import annotations

import random
from array import array

import numpy as np

from quire.core.shared_prefix import MIN_ROWS, MIN_TOKENS, CommonBlocks
from quire.types import BlockTable, EngineRequest, Request, SamplingParams

BLOCK = 16
LEAST = MIN_TOKENS // BLOCK


def request(name: int, blocks: list[int]) -> Request:
    params = SamplingParams()
    source = EngineRequest(str(name), [1], params)
    none = frozenset[int]()
    return Request(
        str(name), 1, array("i", [1]), params, (name,), 9, none, none, 0, source, tables=[BlockTable(blocks)]
    )


def rows(*tables: list[int]) -> list[Request]:
    return [request(i, table) for i, table in enumerate(tables)]


def test_all_rows_share() -> None:
    common = list(range(LEAST + 5))
    found = CommonBlocks(BLOCK).find(rows(*(common + [100 + i] for i in range(MIN_ROWS))), 0)
    assert found is not None and (found == len(common) * BLOCK).all()


def test_rows_apart_are_marked() -> None:
    common = list(range(LEAST + 3))
    tables = [common + [200 + i] for i in range(MIN_ROWS)] + [[500 + i] * 40 for i in range(5)] + [[0]]
    order = list(range(len(tables)))
    random.Random(1).shuffle(order)
    found = CommonBlocks(BLOCK).find(rows(*(tables[i] for i in order)), 0)
    assert found is not None
    assert [bool(n) for n in found] == [i < MIN_ROWS for i in order]


def test_too_few_rows_or_tokens() -> None:
    long, short = list(range(LEAST)), list(range(LEAST - 1))
    assert CommonBlocks(BLOCK).find(rows(*(long + [100 + i] for i in range(MIN_ROWS - 1))), 0) is None
    assert CommonBlocks(BLOCK).find(rows(*(short + [100 + i] for i in range(MIN_ROWS))), 0) is None
    assert CommonBlocks(BLOCK).find(rows(*([100 + i] * 40 for i in range(MIN_ROWS))), 0) is None
    # The last block of a row is never shared.
    assert CommonBlocks(BLOCK).find(rows(*(long for _ in range(MIN_ROWS))), 0) is None


def test_the_answer_is_kept_while_the_batch_is() -> None:
    common = list(range(LEAST + 1))
    batch = rows(*(common + [100 + i] for i in range(MIN_ROWS)))
    blocks = CommonBlocks(BLOCK)
    found = blocks.find(batch, 1)
    batch[0].tables = [BlockTable([7])]
    assert blocks.find(batch, 1) is found
    again = blocks.find(batch, 2)
    assert again is None  # one row too few


def test_random_tables_against_a_plain_search() -> None:
    rng = random.Random(3)
    seen = 0
    for _ in range(300):
        trunk = list(range(60))
        tables = []
        for i in range(rng.randint(MIN_ROWS, 40)):
            cut = rng.choice((0, 20, 20, 40, 50))
            tables.append(trunk[:cut] + [1000 + 100 * i + j for j in range(rng.randint(1, 30))])
        found = CommonBlocks(BLOCK).find(rows(*tables), 0)
        if found is None:
            continue
        seen += 1
        (tokens,) = set(found[found > 0].tolist())
        sharing = np.flatnonzero(found)
        assert tokens >= MIN_TOKENS and len(sharing) >= MIN_ROWS
        for i in sharing:
            assert (
                tables[i][: tokens // BLOCK] == trunk[: tokens // BLOCK] and len(tables[i]) > tokens // BLOCK
            )
    assert seen > 100
