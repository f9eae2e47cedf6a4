"""Whole trainers and generation: ours and TRL's, on the same rollouts."""
