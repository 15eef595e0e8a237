"""Optimizers, schedules, losses, weight averages and precision."""
