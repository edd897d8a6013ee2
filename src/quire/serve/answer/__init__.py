"""From generated text to an answer: parsers of reasoning and tool calls, blocks, choices."""
