"""What a training run needs before it is started: operations, memory, time (`docs/scaling.md`)."""
