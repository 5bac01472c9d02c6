"""Batch transforms, which add arrays to batches: reference, teacher, rollouts; see `program.batch_transform`."""
