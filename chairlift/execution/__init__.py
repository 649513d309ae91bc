"""Compute: from a plan to tensors, through the model, to tokens."""
