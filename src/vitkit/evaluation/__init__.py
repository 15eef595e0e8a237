"""Metrics, intervals, calibration, comparison and feature classifiers, without training."""
