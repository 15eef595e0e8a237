"""Google's `.npz` files: vit_jax's and big_vision's."""
