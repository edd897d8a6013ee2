"""Llama 2 and 3.x, Mistral (windowed layers) and models of the same architecture: the decoder without changes.

Biases, rotary scaling and windows come from the spec.
"""

from __future__ import annotations

from quire.models.decoder import DecoderModel


class LlamaModel(DecoderModel):
    """Llama (arXiv:2302.13971, arXiv:2407.21783) and Mistral 7B (arXiv:2310.06825)."""
