"""One module or package a format: its key table, detection and configuration."""
