"""Attention over a paged KV cache: one contract, a plain reference, and faster forms held to it."""
