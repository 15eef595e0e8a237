"""Trials before the first step: learning rate, batch size and compilation."""
