"""Auxiliary models (reference, teacher, rollouts) that add arrays to the batches; see framework.program.batch_transform."""
