"""The text side: tokenizer, detokenizer, chat templates, engine clients. No torch."""
