"""Model geometry, weights, tokenizer and decoder block."""
