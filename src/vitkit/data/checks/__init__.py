"""What is wrong with a data set: unreadable files, leaks, duplicates and labels."""
