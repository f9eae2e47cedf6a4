"""The formulas, each derived once: log-probs, statistics of rows, the loss and its inputs, divergences."""
