"""OpenAI's Responses API: it turns requests into chats and answers into items, and stores responses."""
