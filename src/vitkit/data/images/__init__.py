"""Image files: decoding, integrity and the evaluation transform."""
