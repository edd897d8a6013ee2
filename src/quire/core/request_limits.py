"""The limits of a scheduler, and the check for requests that exceed them."""

from __future__ import annotations

from dataclasses import dataclass

from quire.core.blocks import Blocks
from quire.types import EngineRequest, RequestError, RequestTargets, answer_room


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """The limits that a scheduler works within. Sizes are in tokens."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    keeps_kv: bool = True  # False if every step computes the whole sequence again
    lookahead: bool = True  # schedule a row while its last token is still in flight
    mixed_prefill_tokens: int = 1 << 30  # prompt-token budget of steps that also decode
    max_logit_rows: int = 1 << 30  # most tokens that a step samples, draft tokens included
    targets: RequestTargets = RequestTargets()  # of requests without their own
    stages: int = 1  # of the pipeline: a sampled token can be read that many steps later

    def full_length(self, request: EngineRequest, blocks: Blocks) -> int:
        """Return the number of tokens at which a request has its full length, prompt included.

        Raises:
            RequestError: if the request could not run even alone with all blocks. The message gives the sizes.
        """
        prompt_len = len(request.prompt)
        if prompt_len == 0:
            raise RequestError("prompt must hold at least one token", param="prompt")
        room = answer_room(prompt_len, self.max_model_len, request.pooling)
        answer = room if request.params.max_tokens is None else min(request.params.max_tokens, room)
        total = prompt_len + answer
        # The last token's KV is never written.
        needed = blocks.most_blocks(total - 1)
        if needed > blocks.pool.num_blocks:
            raise RequestError(
                f"the request needs {needed} KV blocks of {self.block_size} tokens (prompt {prompt_len} + "
                f"max_tokens {answer}), but kv_cache_memory holds {blocks.pool.num_blocks} blocks; "
                "shorten the prompt, lower max_tokens or raise kv_cache_memory"
            )
        return total
