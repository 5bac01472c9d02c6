"""`with_lora`: adds LoRA adapters to any function of a pytree, whatever library the model comes from.

Hu et al. 2021, arXiv 2106.09685; with matrices in 4 bits QLoRA (Dettmers et al. 2023, arXiv 2305.14314).
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp

from plimsoll.extras.functions.factored_matrix import FactoredMatrix
from plimsoll.extras.functions.leaf_selection import is_array
from plimsoll.extras.functions.lora_adapters import Adapters, check_adapters, is_quantized
from plimsoll.extras.functions.lora_interpreter import Interpreter
from plimsoll.framework.layout import PyTree, path_name


def with_lora(function: Callable[..., PyTree], *, materialize: str | None = None) -> Callable[..., PyTree]:
    """Return the function with W + scale * A B in place of each matrix W that has an adapter.

    Where such a matrix is multiplied, the function computes x W + scale * (x A) B. Where rows of it are looked up, it
    adds rows of A times B. Before that, the matrix may be cast, transposed, reshaped, sliced, broadcast and multiplied
    by a number, in loops, branches and calls. So no array of W's size is allocated, forward or backward. The result
    equals `function(lora_merge(params, adapters), ...)` up to rounding.

        adapters = pl.lora_init(jax.random.key(0), params, "attention", rank=16)
        loss, gradient = jax.value_and_grad(pl.with_lora(loss), argnums=1)(params, adapters, batch)

    If the matrix is passed to a function with a custom derivative (`jax.custom_vjp`, `jax.custom_jvp`), the function
    body is differentiated instead.

    Complexity, for a matrix [n, m] with rank r and T rows of x: r (n + m) T multiplications forward and twice as many
    backward, in addition to the function's own, but without the n m T for the gradient of W. T r numbers are saved for
    the backward pass. Tracing processes the function's operations a second time.

    Args:
        function: `function(params, *arguments)`, jitted or not, that JAX can trace. Leaves of the arguments that are
            not arrays are passed unchanged.
        materialize: a regex, searched in paths. A matching matrix becomes a full array wherever another operation, such
            as a norm of the weights, needs it. By default that is an error.

    Returns:
        A function of `(params, adapters, *arguments)` that works with `jax.jit`, `jax.grad`, `jax.vmap` and so on. A
        matrix of `params` may be a `QuantizedMatrix`, with or without an adapter. It is dequantized where it is
        multiplied, one matrix of a stack at a time, and again in the backward pass.

    Raises:
        AdapterError: when called: a matrix reaches an operation that cannot be computed from its factors.
        ValueError: when called: an adapter's path names no matrix, or its factors have other shapes.
        ValueError: immediately: `materialize` is not a valid regex.
    """
    try:
        interpreter = Interpreter(None if materialize is None else re.compile(materialize))
    except re.error as error:
        raise ValueError(f"materialize = {materialize!r} is not a regular expression: {error}") from error

    @functools.wraps(function)
    def with_adapters(params: PyTree, adapters: Adapters, *arguments: PyTree, **named_arguments: PyTree) -> PyTree:
        check_adapters(params, adapters)
        return _interpret_call(interpreter, function, adapters, (params, arguments, named_arguments))

    with_adapters.__signature__ = _with_adapters_second(function)  # pyright: ignore[reportAttributeAccessIssue]
    return with_adapters


def _interpret_call(
    interpreter: Interpreter,
    function: Callable[..., PyTree],
    adapters: Adapters,
    call: tuple[PyTree, tuple[PyTree, ...], dict[str, PyTree]],
) -> PyTree:
    """Call the function with adapters and return its result; `call` is (params, arguments, named arguments)."""
    nodes, structure = jax.tree_util.tree_flatten_with_path(call, is_leaf=is_quantized)
    values = [node for _, node in nodes]
    traced_positions = [position for position, value in enumerate(values) if is_array(value) or is_quantized(value)]

    def call_with_arrays(*arrays: jax.Array) -> PyTree:
        leaves = list(values)
        for position, array in zip(traced_positions, arrays, strict=True):
            leaves[position] = array
        inner_params, inner_arguments, inner_named = structure.unflatten(leaves)
        return function(inner_params, *inner_arguments, **inner_named)

    shapes = []
    for position in traced_positions:
        value = values[position]
        # The function sees a matrix in 4 bits as the array that it stands for.
        shapes.append(jax.ShapeDtypeStruct(value.shape, value.dtype) if is_quantized(value) else value)
    closed, results = jax.make_jaxpr(call_with_arrays, return_shape=True)(*shapes)
    operands = []
    for position in traced_positions:
        keypath, value = nodes[position]
        # The first key separates the parameters from the other arguments.
        path = path_name(keypath[1:]) if keypath[0].idx == 0 else None
        if path is not None and (path in adapters or is_quantized(value)):
            weight = value if is_quantized(value) else jnp.asarray(value)
            adapter = adapters.get(path)
            left, right = (None, None) if adapter is None else adapter.factors(len(weight.shape))
            value = FactoredMatrix(path, weight, left, right, 1.0 if adapter is None else adapter.scale)
        operands.append(value)
    arrays = interpreter.arrays(interpreter.run(closed.jaxpr, closed.consts, operands), None)
    return jax.tree.unflatten(jax.tree.structure(results), arrays)


def _with_adapters_second(function: Callable[..., PyTree]) -> inspect.Signature | None:
    """Return the function's signature with an `adapters` argument in second place; None if that is impossible."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return None
    parameters = list(signature.parameters.values())
    if not parameters or parameters[0].kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD:
        return None
    adapters = inspect.Parameter("adapters", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    # An argument without a default may not follow one that has it.
    required = [parameters[0].replace(default=inspect.Parameter.empty), adapters]
    return signature.replace(parameters=[*required, *parameters[1:]])
