"""The head by itself: what is measured, by which implementations, after which check, in which processes."""
