"""What runs in the next step. Refuses to know tensors, clocks and clients."""
