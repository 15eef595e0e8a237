"""Images in, batches of pixels out; nothing here knows a model.

    sources/        open a dataset by its name, address or files
    checks/         decode every image once and report problems before a run
    loading/        batches in the order of an epoch, by worker processes
    datasets/       `Dataset` and its `Split`s, class names, cuts, caches
    augmentation/   random changes, each a function of its keys
    images/         decode image files; the evaluation transform

A package imports only from those in the rows below it; the first three do not know each other, nor
do `datasets` and `augmentation`.
"""
