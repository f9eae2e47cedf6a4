"""The command line: its options, a dry run, an estimate of memory."""
