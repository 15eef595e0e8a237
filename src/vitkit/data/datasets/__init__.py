"""Datasets in memory: splits, class names, caches and scans."""
