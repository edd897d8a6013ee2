"""Device side of the engine: slot columns, batches, KV cache, runner and executors."""
