"""Long-context decoding when the KV cache does not fit the accelerator's memory."""
