"""Several processes: launching them and splitting the model over them."""
