"""What happens between the steps of a run: one concern a module."""
