"""Reading of the command line: what a verb takes, and what is wrong with what it was given."""
