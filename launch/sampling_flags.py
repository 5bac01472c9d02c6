"""Sampling flags, for the verbs that generate text."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from plimsoll.launch import cli

if TYPE_CHECKING:
    from plimsoll.framework.inference.sampling import Sampling


def add_flags(parser: cli.Parser, *, max_new_tokens: str, seed: str) -> None:
    """Add the sampling flags.

    Args:
        parser: parser of the verb.
        max_new_tokens: help text of --max_new_tokens.
        seed: help text of --seed.
    """
    add = parser.add_argument
    add("--max_new_tokens", type=int, metavar="N", help=max_new_tokens)
    add("--temperature", type=float, default=0.8, help="0 is greedy; default 0.8")
    add("--top_k", type=int, metavar="K", help="draw from the K most likely tokens")
    add("--top_p", type=float, default=1.0, metavar="P", help="from the most likely that make up P")
    add("--seed", type=int, default=0, help=seed)


def build_sampling(args: argparse.Namespace, default_tokens: int) -> Sampling:
    """Build the sampling settings from the flags, before a model is loaded, so that mistakes show before JAX starts.

    Raises:
        ValueError: a flag is out of range.
    """
    from plimsoll.framework.inference.sampling import Sampling

    max_tokens = default_tokens if args.max_new_tokens is None else args.max_new_tokens
    return Sampling(max_tokens, args.temperature, args.top_k, args.top_p, seed=args.seed)
