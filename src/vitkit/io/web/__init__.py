"""Files from the web: connections, downloads that go on where they broke, single images."""
