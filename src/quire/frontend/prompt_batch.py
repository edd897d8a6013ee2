"""The prompts of a call of `LLM`: one or several, with one option for all or one for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.frontend.processor import Prompt
from quire.types import RequestError


def as_batch(prompts: Any) -> Sequence[Prompt]:
    """Wrap a single prompt (a string, a mapping or a list of integers) in a list."""
    if isinstance(prompts, (str, Mapping)) or not isinstance(prompts, Sequence):
        return [prompts]
    return [prompts] if prompts and isinstance(prompts[0], int) else prompts


def per_prompt(given: Any, count: int, name: str) -> list[Any]:
    """Return `given` as a list with one entry per prompt, or raise RequestError that names the field `name`."""
    if not isinstance(given, (list, tuple)):
        return [given] * count
    if len(given) != count:
        raise RequestError(
            f"{name} has {len(given)} entries for {count} prompts: give one for all or one per prompt",
            param=name,
        )
    return list(given)


def text_of(prompt: Prompt) -> str | None:
    """Return the text of a prompt, or None if it has token ids only."""
    if isinstance(prompt, str):
        return prompt
    return prompt.get("prompt") if isinstance(prompt, Mapping) else None
