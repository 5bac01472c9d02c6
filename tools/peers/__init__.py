"""Comparison of our models with `transformers`: the compared shapes, the mapping of parameters, both sides' results.

families    the shapes, as a transformers config and as ours; imports neither torch nor transformers
theirs      results of torch and transformers; imports both
ours        our results
recording   stored results of theirs, so that tests need neither

optimizers, optimizer_cases: the same for optimizers (torchao, adam-mini, lomo-optim); galore: for galore-torch.
"""
