"""Who owns which block of the KV cache."""
