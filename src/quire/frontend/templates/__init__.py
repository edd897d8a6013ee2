"""Chat templates: probed once, rendered in helper processes within limits."""
