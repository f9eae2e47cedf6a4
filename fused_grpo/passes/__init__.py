"""What happens to a tile of logits: the row passes, in Triton and in plain torch, and the choice between them."""
