"""Checks of a dataset before training: unreadable files, leaks, duplicates and labels."""
