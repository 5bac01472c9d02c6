"""Our models against `transformers`: the shapes that are compared, how parameters correspond, both sides' numbers.

families    the shapes, as a transformers config and as ours; imports neither torch nor transformers
names       transformers' parameter names -> our paths
theirs      what torch and transformers compute (the only file here that imports them)
ours        what we compute
recording   what is stored of theirs, so that tests need neither

optimizers, optimizer_cases: the same for optimizers (torchao, adam-mini, lomo-optim); galore: for galore-torch.
"""
