"""How a bucket's sparsified tensors become the payload of a message, and back: one encoder for each way."""
