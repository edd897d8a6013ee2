"""The path from generated text to an answer: parsers of reasoning and tool calls, content blocks, choices."""
