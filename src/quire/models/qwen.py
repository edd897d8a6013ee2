"""Qwen2, Qwen2.5 (a bias on q, k, v) and Qwen3 (a norm on each q and k head): options of the skeleton.

`max_window_layers` is already resolved into the spec's windows.
"""

from __future__ import annotations

from quire.models.decoder import DecoderModel


class QwenModel(DecoderModel):
    """Qwen2: arXiv:2407.10671; Qwen3: arXiv:2505.09388."""
