"""Figures for papers and HTML for notebooks: drawing only; it knows arrays and names, no model."""

MAX_CLASSES = 2000
"""Classes of the largest confusion matrix; each has a pixel of the PNG file at least."""
