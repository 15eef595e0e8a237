"""The process of one contender, and all that it can be asked to build."""
