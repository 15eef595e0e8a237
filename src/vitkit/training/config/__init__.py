"""The settings of a run, their names, and the YAML that holds them."""
