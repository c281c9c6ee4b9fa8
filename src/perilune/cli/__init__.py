"""The command line: one file a noun. Parses, builds, calls."""
