"""Anthropic's API: its requests as chats, and answers to chats as its messages."""
