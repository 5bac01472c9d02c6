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
    add("--temperature", type=float, default=0.8, help="sampling temperature; 0 is greedy; default 0.8")
    add("--top_k", type=int, metavar="K", help="sample only from the K most likely tokens")
    add(
        "--top_p",
        type=float,
        default=1.0,
        metavar="P",
        help="sample only from the most likely tokens with total probability P; default 1",
    )
    add("--seed", type=int, default=0, help=seed)


def build_sampling(args: argparse.Namespace, default_tokens: int) -> Sampling:
    """Build the sampling settings from the flags. Needs no model, so that mistakes are reported before JAX starts.

    Args:
        args: parsed flags of `add_flags`.
        default_tokens: maximum number of new tokens without --max_new_tokens.

    Raises:
        ValueError: a flag is out of range.
    """
    from plimsoll.framework.inference.sampling import Sampling

    max_tokens = default_tokens if args.max_new_tokens is None else args.max_new_tokens
    return Sampling(max_tokens, args.temperature, args.top_k, args.top_p, seed=args.seed)
