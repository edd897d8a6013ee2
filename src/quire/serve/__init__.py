"""The HTTP server: OpenAI's routes and a few more, over an engine process. No torch."""
