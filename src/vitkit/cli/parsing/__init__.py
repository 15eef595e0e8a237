"""Parsing of the command line: the arguments of each verb, and errors in one line."""
