"""Operations, memory and time of a training, by formula, before it starts (`docs/scaling.md`)."""
