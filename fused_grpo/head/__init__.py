"""The head, a chunk of logits at a time: its GEMMs, the plans through it, their gradients."""
