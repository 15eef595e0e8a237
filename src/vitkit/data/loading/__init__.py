"""Order, loader processes and the batch transform on the device."""
