"""Evaluation without training: metrics, intervals, calibration, comparison, feature classifiers."""
