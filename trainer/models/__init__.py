"""Models: loading, adapters, their weights as a stream, an estimate of the memory."""
