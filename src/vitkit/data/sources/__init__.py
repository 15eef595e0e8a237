"""Where images come from: folders, lists, archives, tables and the Hub."""
