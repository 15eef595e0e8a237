"""Figures for papers and HTML for notebooks: drawing of arrays and names; no models."""

MAX_CLASSES = 2000
"""Classes of the largest confusion matrix; each has a pixel of the PNG file at least."""
