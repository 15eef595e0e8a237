"""Speed of vitkit beside other libraries: the same weights, equal logits, in turn.

`python benchmarks/versus --help`; the scripts beside this folder use parts of it.
"""
