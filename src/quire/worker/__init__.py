"""The device side of the engine: slots, batches, KV cache, runner."""
