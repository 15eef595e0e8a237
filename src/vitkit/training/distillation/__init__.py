"""Knowledge distillation: the teacher, its targets, the losses and the wrapper."""
