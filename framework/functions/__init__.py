"""For training loops of one's own: updates inside the backward pass, and optimizer state that streams from the host."""
