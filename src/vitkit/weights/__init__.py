"""Checkpoints in and out: `formats` has vitkit's own and all others, `files` opens files."""
