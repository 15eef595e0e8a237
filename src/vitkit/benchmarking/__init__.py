"""Speed of vitkit beside other libraries: the same weights, equal logits, in turn."""
