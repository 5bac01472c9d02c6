"""Alters published models one field at a time, and checks that we compute the same as transformers, or refuse.

    python -m tools.check_altered                # every alteration of every shape: about 6,000 directories
    python -m tools.check_altered --sample=250   # some of them, drawn from --seed
    python -m tools.check_altered --shape=qwen3 --only=rope_scaling

Exit status 1: some directories load silently but compute something else, or fail with an error that does not name its
cause. Needs torch and transformers (pip install -e '.[peers]').
"""

from __future__ import annotations

import argparse
import collections
import copy
import itertools
import logging
import math
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import safe_open

from plimsoll.framework import families
from plimsoll.framework.layers.base import Context
from plimsoll.framework.layout import unflatten
from plimsoll.framework.models.causal_lm import CausalLM
from plimsoll.framework.weights.directory import Directory, check_tensors
from plimsoll.framework.weights.family import ModelFamily
from plimsoll.framework.weights.source import layer_shape
from tools.peers.alterations import SEQ_LEN, Alteration, alterations, base_facts
from tools.peers.families import FAMILIES, VOCAB
from tools.peers.recording import Tensors

LIMIT = 1e-4  # as a fraction of the largest logit
_LARGEST_ROUNDING = 1e-3  # as a fraction of the largest logit; a greater difference cannot come from rounding
LARGEST = 2_000_000  # elements of a model that is created with its own weights for an alteration
AGREE, WE_REFUSE, THEY_REFUSE = "agree", "we refuse", "they refuse"
SILENT, UNNAMED = "SILENTLY DIFFERENT", "UNNAMED ERROR"
FAILURES = (SILENT, UNNAMED)
TOKENS = np.random.default_rng(3).integers(0, VOCAB, (2, SEQ_LEN), dtype=np.int64)


@dataclass(frozen=True)
class AlterationVerdict:
    """Result for one directory; `reason` is the text of a refusal, or the difference."""

    alteration: Alteration
    kind: str
    reason: str

    def __str__(self) -> str:
        return f"{self.kind:20} {self.alteration.shape:14} {self.alteration.name}: {self.reason}"


def our_logits(folder: Path) -> np.ndarray:
    """Return float32[B, S, V] logits of a directory, with its weights rounded as in a run, computed in float32.

    Raises:
        FileNotFoundError, ValueError: the directory is refused.
    """
    model_config, family_config = families.load_model_config(folder)
    model_config.compute_dtype = "float32"
    model: CausalLM = model_config.instantiate()
    family: ModelFamily = family_config.instantiate()
    directory = Directory(folder)
    weights: dict[str, Any] = {}
    for path, sources in check_tensors(directory, family, model).items():
        spec = model.base_specs[path]
        shape = layer_shape(spec)
        whole = tuple(slice(None) for _ in shape)
        layers = [source.read(directory.tensor, shape, whole) for source in sources]
        array = np.stack(layers) if spec.num_layers is not None else layers[0]
        weights[path] = jnp.asarray(array).astype(model.param_dtype).astype(jnp.float32)
    context = Context({"tokens": jnp.asarray(TOKENS, jnp.int32)})
    with jax.disable_jit():
        return np.asarray(model.logits(unflatten(weights), context, {}))


def their_logits(folder: Path, dtype: str = "float32") -> np.ndarray:
    """Return the logits of transformers, computed in float32 or float64.

    Our code converts float16 weights to bfloat16, so this does too, although transformers uses float16 directly. Raises
    anything that transformers raises.
    """
    import torch
    import transformers

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            rounded = parameter.bfloat16() if parameter.dtype == torch.float16 else parameter
            parameter.data = rounded.to(getattr(torch, dtype))
        outputs = model(torch.as_tensor(TOKENS))
    return (outputs[0] if isinstance(outputs, tuple) else outputs.logits).numpy()


def their_shapes(facts: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return {name: shape} of the tensors of transformers' model for a config.json, without allocating any.

    Raises:
        Any exception of transformers.
    """
    import torch
    import transformers

    with torch.device("meta"):
        # Copied, because transformers completes the objects of a config.json in place, and alterations share them.
        config = transformers.AutoConfig.for_model(**copy.deepcopy(facts))
        model: Any = transformers.AutoModelForCausalLM.from_config(config)
    tied = set(model.all_tied_weights_keys)
    return {name: tuple(x.shape) for name, x in model.state_dict().items() if name not in tied}


def get_saved_shapes(facts: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return {name: shape} of the tensors that transformers saves for a config.json.

    They differ from the model's if the model holds in one tensor what its files store in several, such as all experts.

    Raises:
        Any exception of transformers.
    """
    import transformers

    config = transformers.AutoConfig.for_model(**facts)
    model: Any = transformers.AutoModelForCausalLM.from_config(config)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        with safe_open(Path(folder) / "model.safetensors", "numpy") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


def random_tensors(shapes: dict[str, tuple[int, ...]], *, zero_centered: bool) -> Tensors:
    """Draw weights with which every part of a model affects the output, even norms' eps (by small embeddings)."""
    tensors: Tensors = {}
    for number, (name, shape) in enumerate(shapes.items()):
        noise = np.random.default_rng(number).standard_normal(shape)
        if len(shape) == 3:
            # Experts [E, out, in], and convolutions [out, 1, in].
            value = noise * 1.2 / math.sqrt(max(shape[2], 1))
        elif len(shape) == 2:
            is_table = any(part in name for part in ("embed", "wte", "wpe", "lm_head"))
            value = noise * (0.1 if is_table else 1.2 / math.sqrt(max(shape[0], 1)))
        elif name.endswith("bias"):
            value = 0.2 * noise
        else:
            value = (0.0 if zero_centered else 1.0) + 0.25 * noise
        # Values that float16 represents exactly, so that rounding them twice equals rounding them once.
        tensors[name] = value.astype(np.float16).astype(np.float32)
    return tensors


def quietly(compute: Callable[[Path], np.ndarray], folder: Path) -> np.ndarray | Exception:
    """Return the result of a function, or the exception that it raised."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        try:
            return compute(folder)
        except Exception as error:  # transformers, torch or a bug of ours may raise anything
            return error


def judge(alteration: Alteration, tensors: Tensors) -> AlterationVerdict:
    """Write the directory and compare both implementations."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        alteration.write(folder, tensors)
        ours = quietly(our_logits, folder)
        if isinstance(ours, Exception):
            text = str(ours).replace(name, "DIR").replace("\n", " ")
            named = isinstance(ours, (ValueError, FileNotFoundError)) and not isinstance(ours, UnicodeError)
            return AlterationVerdict(
                alteration, WE_REFUSE if named else UNNAMED, f"{type(ours).__name__}: {text[:200]}"
            )
        theirs = quietly(their_logits, folder)
        precise = theirs
        if _differ(ours, theirs):
            # Some weights amplify rounding, so a float64 result decides between two float32 results.
            precise = quietly(partial(their_logits, dtype="float64"), folder)
    if isinstance(theirs, Exception):
        return AlterationVerdict(alteration, THEY_REFUSE, f"{type(theirs).__name__}: {str(theirs)[:120]!r}")
    if not np.isfinite(theirs).all():
        return AlterationVerdict(alteration, THEY_REFUSE, "not finite")
    if ours.shape != theirs.shape:
        return AlterationVerdict(alteration, SILENT, f"shapes {ours.shape}, {theirs.shape}")
    difference = _difference(ours, theirs)
    text = f"{difference:.1e} of the largest logit"
    if difference <= LIMIT:
        return AlterationVerdict(alteration, AGREE, text)
    if isinstance(precise, Exception):
        return AlterationVerdict(alteration, SILENT, text)
    our_error = _difference(ours, precise)
    their_error = _difference(theirs, precise)
    agrees = our_error <= max(LIMIT, 2 * their_error) <= _LARGEST_ROUNDING
    text += f"; from float64 we differ by {our_error:.1e}, transformers in float32 by {their_error:.1e}"
    return AlterationVerdict(alteration, AGREE if agrees else SILENT, text)


def _difference(logits: np.ndarray, expected: np.ndarray) -> float:
    """Return the largest difference as a fraction of the largest expected logit."""
    return float(np.abs(logits - expected).max() / np.abs(expected).max())


def _differ(ours: np.ndarray, theirs: np.ndarray | Exception) -> bool:
    """Return whether both are logits of the same shape that differ by more than the limit."""
    return isinstance(theirs, np.ndarray) and ours.shape == theirs.shape and _difference(ours, theirs) > LIMIT


def weights_for(alteration: Alteration, base: Tensors) -> Iterator[tuple[Alteration, Tensors]]:
    """Yield the directory with the shape's weights, and also with its own if config.json requires other weights."""
    yield alteration, base
    try:
        shapes = their_shapes(alteration.facts)
        elements = sum(math.prod(shape) for shape in shapes.values())
        if alteration.damage or elements > LARGEST or shapes == their_shapes(base_facts(alteration.shape)):
            return
        shapes_in_file = get_saved_shapes(alteration.facts)
    except Exception:  # transformers may refuse the config.json in many ways
        return
    anew = Alteration(alteration.shape, f"{alteration.name}, its own weights", alteration.facts)
    yield anew, random_tensors(shapes_in_file, zero_centered=FAMILIES[alteration.shape].has_zero_centered_norms)


def all_alterations(shape: str) -> Iterator[Alteration]:
    """Yield all alterations of a shape, including every field of transformers' config class."""
    import transformers

    fields = transformers.AutoConfig.for_model(**base_facts(shape)).to_dict()
    yield from alterations(shape, fields)


def verdicts(
    shapes: Iterable[str], *, sample: int | None = None, seed: int = 0, only: str = ""
) -> Iterator[AlterationVerdict]:
    """Yield verdicts for the shapes' alterations whose names contain `only`, or for a random sample of them."""
    import torch
    import transformers

    transformers.logging.set_verbosity(logging.CRITICAL)
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)  # Models are tiny, so threads would only wait for each other.
    cases = [case for shape in shapes for case in all_alterations(shape) if only in case.name]
    if sample is not None and sample < len(cases):
        chosen = np.random.default_rng(seed).choice(len(cases), sample, replace=False)
        cases = [cases[i] for i in sorted(chosen)]
    for shape, group in itertools.groupby(cases, lambda case: case.shape):
        zero_centered = FAMILIES[shape].has_zero_centered_norms
        base = random_tensors(get_saved_shapes(base_facts(shape)), zero_centered=zero_centered)
        for case in group:
            for alteration, tensors in weights_for(case, base):
                yield judge(alteration, tensors)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(FAMILIES), action="append", help="check only this shape; repeatable")
    parser.add_argument("--only", default="", metavar="TEXT", help="check only alterations whose name contains TEXT")
    parser.add_argument("--sample", type=int, metavar="N", help="check only N randomly chosen directories")
    parser.add_argument("--seed", type=int, default=0, help="random seed of --sample")
    parser.add_argument("--verbose", action="store_true", help="print a line for each directory")
    args = parser.parse_args(argv)
    counts: collections.Counter[str] = collections.Counter()
    for verdict in verdicts(args.shape or FAMILIES, sample=args.sample, seed=args.seed, only=args.only):
        counts[verdict.kind] += 1
        if args.verbose or verdict.kind in FAILURES:
            print(verdict, flush=True)
    print(f"{sum(counts.values())} directories: {', '.join(f'{n} {kind}' for kind, n in counts.most_common())}")
    return 1 if any(counts[kind] for kind in FAILURES) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
