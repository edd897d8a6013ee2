"""The host side of the engine: scheduler, pages, prefix cache, step loop. No torch."""
