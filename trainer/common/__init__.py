"""What every room uses: text, secrets, names of files, threads, warnings."""
