"""Weights files: opened lazily, pickles and archives checked first."""
