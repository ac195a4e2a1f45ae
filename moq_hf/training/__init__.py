"""A run: the controller, the measures, resuming, distillation and the messages."""
