"""What a run shows and leaves: metrics, console, trackers, report, model card."""
