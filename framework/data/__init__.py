"""The only input pipeline; `pipeline.DataPipeline` is the entry point. Slow imports are inside functions."""
