"""Operations, memory and time of a training, before it is started (`docs/scaling.md`)."""
