"""Draft heads: small networks that continue the hidden states of a model by a few tokens."""
