"""Google's `.npz` files."""
