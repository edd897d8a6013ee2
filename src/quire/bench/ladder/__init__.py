"""The ladder: one idea of serving after the other, each measured against the rung below it."""
