"""Objectives: what a language model minimizes in place of the next tokens' cross-entropy."""
