"""Objectives: losses that replace the next tokens' cross-entropy of a language model."""
