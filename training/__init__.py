"""How the embedded demo model is made: world, tokenizer, model, training, evaluation."""
