"""Measurements of what a model has learned: filters, positions, attention over depth."""
