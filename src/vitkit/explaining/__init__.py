"""What a model looks at: takes a model and tensors, gives heat maps and images of them."""
