"""From prompts to a rollout buffer that is ready to train on: rewards, advantages, groups, prefetching."""
