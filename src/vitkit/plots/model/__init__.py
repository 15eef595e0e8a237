"""Figures of what a model has learned: panels, one figure each or all on a sheet."""
