"""Experts of which each rank holds some whole (parallel/experts.py says how they are divided).

No rank has a limit on the tokens of an expert, so uneven routing loses none.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from quire.kernels.experts.choice import ExpertChoice
from quire.parallel.experts import ExpertShard
from quire.parallel.ranks import Parallel

# Maps rows x [n, hidden], sorted by their expert ids int64 [n], to [n, hidden].
SortedMLPs = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class LocalExperts:
    """The experts of this rank. The results of others count as zero, so the ranks' results add up to all.

    Args:
        mlps: the MLPs of the experts in `held`, numbered from 0.
        held: the experts of this rank.
        fixed_shapes: keep the rows of other ranks' experts behind the last one, so that no shape depends on the choice.
            The MLPs need not compute them.
    """

    is_partial = True

    def __init__(self, mlps: SortedMLPs, held: range, fixed_shapes: bool) -> None:
        self.mlps, self.held, self.fixed_shapes = mlps, held, fixed_shapes

    def __call__(self, x: torch.Tensor, choice: ExpertChoice) -> torch.Tensor:
        shape, count = choice.ids.shape, len(self.held)
        ids = choice.ids.flatten().long() - self.held.start
        is_held = (ids >= 0) & (ids < count)
        ids = torch.where(is_held, ids, count)
        order = ids.argsort(stable=True)  # [tokens * k], by expert
        if not self.fixed_shapes:
            order = order[: int(is_held.sum())]
        outs = self.mlps(x[order // shape[1]], ids[order])
        by_token = outs.new_zeros(is_held.shape[0], x.shape[1]).index_copy_(0, order, outs)
        # What the MLPs have left in the rows of other experts may be NaN.
        by_token = torch.where(is_held.unsqueeze(1), by_token, 0).view(*shape, x.shape[1])
        # The order of summation is fixed, so a token's result does not depend on the rest of the batch.
        return (by_token * choice.weights.to(x.dtype).unsqueeze(-1)).sum(1)


class ExchangedExperts:
    """The experts of all ranks, to which tokens are sent. The result is complete on every rank.

    Args:
        local: the experts of this rank.
        shard: how experts are divided.
        parallel: the ranks.
    """

    is_partial = False

    def __init__(
        self,
        local: Callable[[torch.Tensor, ExpertChoice], torch.Tensor],
        shard: ExpertShard,
        parallel: Parallel,
    ) -> None:
        self.local, self.parallel = local, parallel
        self.ends = [shard.of(rank, shard.total).stop for rank in range(shard.size)]

    def __call__(self, x: torch.Tensor, choice: ExpertChoice) -> torch.Tensor:
        parallel, tokens = self.parallel, x.shape[0]
        part, own = parallel.padded_cut(tokens)
        ids, weights, x = choice.ids[own].long().contiguous(), choice.weights[own], x[own]
        owner = torch.searchsorted(torch.tensor(self.ends, device=x.device), ids, right=True)
        # [ranks, own tokens]: a token goes to each rank at most once, whatever number of its experts is there.
        goes = (owner.unsqueeze(0) == torch.arange(parallel.size, device=x.device).view(-1, 1, 1)).any(2)
        token = goes.nonzero()[:, 1]  # of each row that is sent, by rank
        sent = goes.sum(1)
        received = parallel.all_to_all(sent, [1] * parallel.size, [1] * parallel.size).tolist()
        counts = sent.tolist()
        rows = parallel.all_to_all(x[token], counts, received)
        # Numbers of experts are exact in float32.
        routing = torch.cat((ids.float(), weights.float()), 1)[token]
        routed_ids, routed_weights = parallel.all_to_all(routing, counts, received).chunk(2, 1)
        outs = self.local(rows, ExpertChoice(routed_ids.long(), routed_weights.contiguous()))
        outs = parallel.all_to_all(outs, received, counts)
        y = x.new_zeros(part, x.shape[1])
        for place, out in zip(token.split(counts), outs.split(counts)):  # in the order of ranks
            y.index_add_(0, place, out)
        return parallel.communicator.all_gather(y).flatten(0, 1)[:tokens]
