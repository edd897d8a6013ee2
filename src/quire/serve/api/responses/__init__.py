"""OpenAI's Responses API: its requests as chats, answers to chats as its items, and what is kept of them."""
