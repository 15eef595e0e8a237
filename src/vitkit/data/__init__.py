"""Pictures in, batches of pixels out; this room knows no model.

`images` is the one decoder (with `formats`, what the bytes are, and `integrity`, whether they are
all there) and `preprocess` the one evaluation transform. `sources` opens a data set by name or by
folder: `folders` reads image folders, `classes` their class names, `embedded` the sets made of
`idx` files, and `splits` holds what they all give back, a `Dataset` of `Split`s. `doctor` decodes
every picture once before a run starts. `augment` changes training pictures at random and `loader`
makes batches, both by `randomness`, where a random number is a function of its keys.
"""
