"""What a person sees of a run and what stays of it. What is long to import is imported inside functions."""
