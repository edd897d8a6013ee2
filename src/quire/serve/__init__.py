"""The HTTP server: the OpenAI and Anthropic APIs in front of an engine process. Nothing here imports torch."""
