"""Llama 2 and 3.x, Mistral (windowed layers) and what is built like them: the plain decoder skeleton.

Biases, rotary scaling and windows come from the spec.
"""

from __future__ import annotations

from quire.models.decoder import DecoderModel


class LlamaModel(DecoderModel):
    """arXiv:2302.13971, arXiv:2407.21783; Mistral 7B: arXiv:2310.06825."""
