"""Text that the verbs print: columns, help, and what to do next."""
