"""The one input pipeline: sources of documents -> tokenizer -> token files -> windows -> deterministic global batches.

`pipeline.DataPipeline` is the door; docs/data.md tells the whole way. Importing anything below `framework.data` is
cheap: grain, tokenizers, pyarrow and fsspec are imported inside the functions that use them, because a config (and so a
typo on the command line) must be answered before a second is spent on libraries. May import: framework.config, numpy.
"""
