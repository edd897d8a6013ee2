"""Expert parallelism: which experts a rank holds whole, and how tokens and experts come together.

All ranks of a group have all tokens of a step, because attention ends with a sum over them. So there are two ways:

- Every rank computes its own experts for all tokens, and one sum over the ranks adds the parts. Each rank sends and
  receives 2 (R - 1) / R rows per token.
- Every rank takes 1/R of the tokens and sends each to the ranks that hold its experts, at most once to each
  (all-to-all). Their results come back the same way, and the tokens are gathered.

`exchange_rows` counts the rows of both. The sum is fewer for the usual top-k. It also has fixed shapes, which CUDA graphs
need; buffers of all-to-all without a capacity limit would have to hold every token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ExpertExchange = Literal["all-reduce", "all-to-all"]


@dataclass(frozen=True, slots=True)
class ExpertShard:
    """How the experts of a layer are divided over the ranks of a group.

    Attributes:
        exchange: how tokens and experts come together; None: every rank has a part of every expert.
        rank, size: this rank's place in the group.
        total: number of experts of a layer.
    """

    exchange: ExpertExchange | None = None
    rank: int = 0
    size: int = 1
    total: int = 0

    def held(self, experts: int) -> range:
        """Return the experts of which this rank has any part. Numbers that do not divide differ by one."""
        return range(experts) if self.exchange is None else self.of(self.rank, experts)

    def of(self, rank: int, experts: int) -> range:
        """Return the experts that `rank` holds whole."""
        return range(rank * experts // self.size, (rank + 1) * experts // self.size)


ALL_EXPERTS = ExpertShard()


def exchange_rows(ranks: int, top_k: int) -> dict[ExpertExchange, float]:
    """Return the rows of the residual stream that each rank sends per token of a step, by kind of exchange.

    Args:
        ranks: number of ranks.
        top_k: experts of a token, assumed to be spread evenly.
    """
    gather = (ranks - 1) / ranks
    others = (ranks - 1) * (1 - (1 - 1 / ranks) ** top_k)  # ranks that a token is sent to
    return {"all-reduce": 2 * gather, "all-to-all": 2 * others / ranks + gather}


def pick_exchange(ranks: int, top_k: int, fixed_shapes: bool) -> ExpertExchange:
    """Return the exchange with the fewest rows; with `fixed_shapes` (CUDA graphs) always the sum."""
    rows = exchange_rows(ranks, top_k)
    return "all-to-all" if not fixed_shapes and rows["all-to-all"] < rows["all-reduce"] else "all-reduce"
