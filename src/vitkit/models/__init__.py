"""Architecture only: no file, no URL, no training.

Eq. 1 is `embedding`, Eq. 2 and 3 `encoder`, Eq. 4 and the whole `vit`. `presets`
names the sizes, `record` keeps what was asked for, `transformer` is the encoder-decoder of 2017.
"""
