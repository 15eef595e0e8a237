"""The choice of an engine: each one is tried in a child process, and the results are cached."""
