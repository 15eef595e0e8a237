"""What a model looks at: takes a model and tensors, gives heat maps and pictures of them."""
