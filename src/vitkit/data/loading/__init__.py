"""Batches: the order of an epoch, worker processes, and the transform on the device."""
