"""The host side of the engine: scheduler, blocks, prefix cache, step loop. No torch."""
