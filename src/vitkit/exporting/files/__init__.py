"""The files of exported models: written, checked before a runtime opens them, and opened."""
