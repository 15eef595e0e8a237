"""Random changes to training images, each a function of its keys; `pipeline` is the chain."""
