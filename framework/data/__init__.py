"""The one input pipeline; `pipeline.DataPipeline` is the door. What is long to import is imported in functions."""
