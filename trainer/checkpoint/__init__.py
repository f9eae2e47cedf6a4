"""Saving and resuming a run: files, manifest, output directory."""
