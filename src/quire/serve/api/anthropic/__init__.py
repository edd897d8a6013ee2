"""Anthropic's Messages API: it turns requests into chats and answers into messages."""
