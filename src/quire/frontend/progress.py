"""The progress bar of `LLM`: finished prompts, with their input and output tokens per second."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.frontend.output import RequestState


class ProgressBar:
    """A progress bar over prompts, or a stand-in that shows nothing."""

    def __init__(self, count: int, shown: bool) -> None:
        """Show a bar over `count` prompts on standard error, or nothing if `shown` is False."""
        self._bar: Any = None
        if shown:
            from tqdm import tqdm

            self._bar = tqdm(total=count, desc="Generating", unit="prompt", dynamic_ncols=True)
        self._tokens_in = self._tokens_out = 0

    def update(self, changed: Sequence[RequestState]) -> None:
        """Advance by the requests among `changed` that are finished."""
        if self._bar is None or not (done := [state for state in changed if state.finished]):
            return
        self._tokens_in += sum(len(state.prompt_token_ids) for state in done)
        self._tokens_out += sum(len(answer.token_ids) for state in done for answer in state.answers)
        elapsed_s = self._bar.format_dict["elapsed"] or 1e-9
        text = f"in {self._tokens_in / elapsed_s:.0f} tok/s, out {self._tokens_out / elapsed_s:.0f} tok/s"
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.update(len(done))

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
