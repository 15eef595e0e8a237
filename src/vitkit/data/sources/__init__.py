"""Sources of images: folders, lists, archives, tables and the Hub."""
