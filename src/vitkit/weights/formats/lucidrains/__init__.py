"""lucidrains' `vit-pytorch`: `state_dict()` files of every era."""
