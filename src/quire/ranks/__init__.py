"""The ranks of an engine as processes: their messages, their start, and the executor over all of them."""
