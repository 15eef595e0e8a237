"""Logs, metrics files, trackers, throughput and image grids."""
