"""Training of the built-in demo model: synthetic world, tokenizer, model, training loop and evaluation."""
