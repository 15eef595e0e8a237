"""Images in, batches of pixels out; this room knows no model.

`images` is the one decoder (with `formats`, what the bytes are, and `integrity`, whether they are
all there) and `preprocess` the one evaluation transform. `sources` opens a data set by its name,
its address or its files: `folders` reads image folders, `csv_files` lists, `embedded` the sets made
of `idx` files, `cifar` the two CIFARs, `webdataset` shards of `tars`, `remote_webdataset` those of
an address (over `remote_shards`), `parquet` and `hub` images in `tables` (out of a
`table_store`). `classes` orders class names, `assemble` numbers them for all splits, `indexes`
keeps what was found out about large files, and `splits` holds what they all give back, a `Dataset`
of `Split`s; `cache` keeps their decoded pixels on disk. `doctor` looks at every image once before
a run starts: `look` decodes it, `memory` keeps what was seen, `duplicates` and `findings` tell what
it means. `order` says whose turn it is, `augment` crops, flips and shifts, and `loader` makes
batches. On the device `feeding` does the rest: `policies` draw `operations`, `erasing` and `mixing`
follow. All of it draws by `randomness`, where a random number is a function of its keys.
"""
