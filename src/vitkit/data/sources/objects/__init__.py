"""Datasets passed as Python objects: arrays, pairs, torch's map-style datasets, `datasets`."""
