"""The rollout buffer, its micro-batches, and their balance across ranks."""
