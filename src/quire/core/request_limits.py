"""What a scheduler must stay within, and which requests could never run."""

from __future__ import annotations

from dataclasses import dataclass

from quire.types import EngineRequest, RequestError


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes are in tokens. `keeps_kv` is False when every step recomputes everything."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    keeps_kv: bool = True
    lookahead: bool = True  # schedule a row whose last token is still in flight
    mixed_prefill_tokens: int = 1 << 30  # for prompts in a step that others use to decode

    def full_length(self, request: EngineRequest, num_blocks: int) -> int:
        """Tokens of prompt and longest answer together. Raises RequestError, with the numbers, for a request
        that could never run, even alone with all `num_blocks` blocks."""
        prompt_len = len(request.prompt)
        if prompt_len == 0:
            raise RequestError("prompt must hold at least one token", param="prompt")
        if prompt_len >= self.max_model_len:
            raise RequestError(
                f"prompt has {prompt_len} tokens, but max_model_len is {self.max_model_len} "
                "and at least one token must be left for the answer",
                param="prompt",
                code="context_length_exceeded",
            )
        room = self.max_model_len - prompt_len
        answer = room if request.params.max_tokens is None else min(request.params.max_tokens, room)
        total = prompt_len + answer
        needed = -(-(total - 1) // self.block_size)  # the last token's KV is never written
        if needed > num_blocks:
            raise RequestError(
                f"the request needs {needed} KV blocks of {self.block_size} tokens (prompt {prompt_len} + "
                f"max_tokens {answer}), but kv_cache_memory holds {num_blocks} blocks; "
                "shorten the prompt, lower max_tokens or raise kv_cache_memory"
            )
        return total
