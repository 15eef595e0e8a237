"""Checkpoints in and out. `checkpoint` is vitkit's own format, `files` writes all or nothing."""
