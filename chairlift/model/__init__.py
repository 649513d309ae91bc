"""The network: where it comes from, its weights, its layers and its attention."""
