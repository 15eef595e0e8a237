"""Files from the web: connections, resumable downloads, single images."""
