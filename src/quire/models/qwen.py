"""Qwen2, Qwen2.5 (bias of q, k, v) and Qwen3 (norm of each q and k head): options of the decoder.

The config's `max_window_layers` is resolved into the spec's windows when it is parsed.
"""

from __future__ import annotations

from quire.models.decoder import DecoderModel


class QwenModel(DecoderModel):
    """Qwen2 (arXiv:2407.10671) and Qwen3 (arXiv:2505.09388)."""
