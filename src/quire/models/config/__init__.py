"""From a checkpoint's configuration to a `ModelSpec`, with every field checked."""
