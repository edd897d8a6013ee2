"""Memory of the host and the device: how much there is, how it is divided, and the KV cache."""
