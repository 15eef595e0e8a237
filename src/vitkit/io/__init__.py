"""Files, caches and the network: what every other package reads and writes with."""
