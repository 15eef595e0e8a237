"""Explanations: heat maps of what a model looks at, from a model and its images."""
