"""Architecture only: no file, no URL, no training.

Eq. 1 is in `embedding`, Eq. 2 and 3 in `encoder`, Eq. 4 and the whole model in `vit`. `presets` has
the sizes by name, `record` keeps what was asked for, `transformer` is the encoder-decoder of 2017.
"""
