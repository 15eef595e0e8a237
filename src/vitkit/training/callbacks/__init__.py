"""Callbacks of a run, one per module."""
