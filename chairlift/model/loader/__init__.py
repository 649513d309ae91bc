"""From files to tensors, and from tensors to a model."""
