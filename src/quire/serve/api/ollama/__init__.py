"""Ollama's API: it turns requests into chats and answers into JSON lines, and describes the served model."""
