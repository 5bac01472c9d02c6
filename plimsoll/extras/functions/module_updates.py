"""The update of a module in the backward pass: its options, its initial state, and new weights from a gradient.

`Updater` holds the state on the device, and `StreamedUpdater` in host memory, one chunk at a time on the device. The
primitive `update_p` marks new weights and state in the program of a backward pass; it is an identity.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn, Required, TypedDict

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from plimsoll.extras.functions.leaf_selection import is_real_float
from plimsoll.extras.functions.stream import StreamedOptimizer, as_streamed_optimizer, select_update
from plimsoll.extras.functions.trained_weights import Trained, encode, num_layers, select_floats, with_floats
from plimsoll.extras.functions.update_rules import (
    OptaxRule,
    Optimizer,
    RuleFunction,
    UpdateRule,
    all_finite,
    as_rule,
    refuse_mixing,
)
from plimsoll.framework.layout import PyTree
from plimsoll.framework.learner.update import slice_layer, write_layer


class UpdateOptions(TypedDict, total=False):
    """Keyword arguments of an update.

    Attributes:
        name: name of the module in errors, profiles and plans.
        skip_nonfinite: whether a gradient with infinities or NaN leaves weights and state as they are; True by default.
        max_update_rms: the largest root mean square of a tensor's update, as in optax (Shazeer and Stern 2018,
            arXiv 1804.04235, section 6); by default None, for no limit.
        mixes: whether the rule may look at several tensors of the module together; False by default. Such a rule is
            refused otherwise, because it would be wrong if it should see all parameters of the model.
    """

    name: Required[str]
    skip_nonfinite: bool
    max_update_rms: float | None
    mixes: bool


def make_updater(
    optimizer_or_rule: Optimizer | RuleFunction,
    *,
    name: str,
    skip_nonfinite: bool = True,
    max_update_rms: float | None = None,
    mixes: bool = False,
) -> Updater:
    """Make the updater for an optax transformation, a `stream` or a function.

    Args:
        optimizer_or_rule: see `eager`.
        name, skip_nonfinite, max_update_rms, mixes: see `UpdateOptions`.

    Raises:
        TypeError: `optimizer_or_rule` is none of the three.
        ValueError: see `as_rule`.
    """
    stream = as_streamed_optimizer(optimizer_or_rule)
    if stream is not None:
        inner_rule = OptaxRule(stream.planner.optimizer, max_update_rms)
        return StreamedUpdater(name, inner_rule, skip_nonfinite, mixes, stream)
    rule = as_rule(optimizer_or_rule, name, max_update_rms)
    return Updater(name, rule, skip_nonfinite, mixes)


# --- state on the device ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Updater:
    """Updates a module by its gradient.

    Attributes:
        name: name of the module.
        rule: the update rule.
        skip_nonfinite: whether a gradient with infinities or NaN leaves weights and state as they are.
        mixes: whether the rule may look at several tensors of the module together.
    """

    name: str
    rule: UpdateRule
    skip_nonfinite: bool
    mixes: bool

    # --- initialization ----------------------------------------------------------------------------------------------

    def encode_weights(self, weights: PyTree) -> tuple[PyTree, PyTree]:
        """Return (the encoded weights, the float weights).

        Raises:
            ValueError: there are no floats, a weight is complex, or some of the weights are already trained.
        """
        for node in jax.tree.leaves(weights, is_leaf=lambda node: isinstance(node, Trained)):
            if isinstance(node, Trained):
                raise ValueError(
                    f"{self.name}: its weights contain {node.name!r}, which is already trained; pass it to the "
                    "module as an input"
                )
        try:
            encoded_weights = encode(weights)
        except ValueError as error:
            raise ValueError(f"{self.name}: its weights have {error}") from None
        floats = select_floats(encoded_weights)
        if not jax.tree.leaves(floats):
            raise ValueError(f"{self.name}: its weights have no array of floats, so there is nothing to train")
        return encoded_weights, floats

    def prepare_state(self, floats: PyTree, state: PyTree | None) -> PyTree:
        """Return the state before the first update: `state` if given, otherwise the rule's initial state.

        Raises:
            ValueError: the rule looks at several tensors together, which `mixes` does not allow.
        """
        if state is None:
            self._check_rule(floats, jax.eval_shape(self.rule.initial_state, floats))
            return _with_arrays(self._init_state(floats))
        given_state = _with_arrays(state)
        self._check_rule(floats, given_state)
        return self._store_state(floats, given_state)

    def prepare_stack_state(self, floats: PyTree, state: PyTree | None) -> PyTree:
        """Return the state of stacked layers, a separate one for each layer: trees of arrays [L, ...]."""
        layer_floats = jax.eval_shape(lambda stack: slice_layer(stack, 0), floats)
        if state is None:
            self._check_rule(layer_floats, jax.eval_shape(self.rule.initial_state, layer_floats))
            return _with_arrays(self._init_stack_state(floats))
        given_state = _with_arrays(state)
        num_layers(self.name, (floats, given_state))
        self._check_rule(layer_floats, jax.eval_shape(lambda stack: slice_layer(stack, 0), given_state))
        return self._store_state(layer_floats, given_state)

    def _init_state(self, floats: PyTree) -> PyTree:
        return self.rule.initial_state(floats)

    def _init_stack_state(self, floats: PyTree) -> PyTree:
        return jax.vmap(self.rule.initial_state)(floats)

    def _store_state(self, floats: PyTree, state: PyTree) -> PyTree:
        """Move a given state, of a module or of a stack with layers like `floats`, to its memory kinds."""
        return state

    def _check_rule(self, floats: PyTree, state: PyTree) -> None:
        if not self.mixes:
            refuse_mixing(self.rule, floats, state, self.name)

    # --- the update --------------------------------------------------------------------------------------------------

    def apply_update(self, trained: Trained, gradient: PyTree, later: PyTree) -> tuple[Trained, PyTree]:
        """Return the weights and the state after one update.

        Args:
            trained: weights and state before the update.
            gradient: gradient of `trained.floats`, with the same structure.
            later: arrays whose consumers must wait for the update.

        Returns:
            (the new weights and state, `later`).
        """
        return apply_barrier((self._update_or_skip(trained, gradient), later))

    def get_layer(self, stack: Trained, index: jax.Array) -> Trained:
        """Return one layer of a stack, with the part of its state that the update reads on the device."""
        return slice_layer(stack, index)

    def apply_layer_update(
        self, stack: Trained, index: jax.Array, layer: Trained, gradient: PyTree, later: PyTree
    ) -> tuple[Trained, PyTree]:
        """Return the stack with one layer's weights and state replaced by the new ones, and `later`.

        Args:
            stack: weights and state of all layers, arrays [L, ...].
            index: index of the layer, an integer.
            layer: the layer as returned by `get_layer`.
            gradient: gradient of the layer.
            later: see `apply_update`.
        """
        new_layer, later = self.apply_update(layer, gradient, later)
        return write_layer(stack, new_layer, index), later

    def _update_or_skip(self, trained: Trained, gradient: PyTree) -> Trained:
        """Return the weights and state after the update, or unchanged if the update is skipped."""
        if not self.skip_nonfinite:
            return self._apply_rule(trained, gradient)
        is_finite = all_finite(gradient)

        def update_with_where(trained: Trained, gradient: PyTree) -> Trained:
            new = self._apply_rule(trained, gradient)
            return jax.tree.map(lambda new_leaf, leaf: jnp.where(is_finite, new_leaf, leaf), new, trained)

        def update_with_cond(trained: Trained, gradient: PyTree) -> Trained:
            return jax.lax.cond(is_finite, self._apply_rule, lambda trained, _: trained, trained, gradient)

        # XLA for CPU drops barriers and would update the weights while it reads the state from the stack that it is
        # about to write, so it would copy whole stacks for every layer. It does not fuse across a branch.
        return jax.lax.platform_dependent(trained, gradient, cpu=update_with_cond, default=update_with_where)

    def _apply_rule(self, trained: Trained, gradient: PyTree) -> Trained:
        floats = trained.floats
        state = trained.state
        with jax.named_scope(f"update_{self.name}"):
            new_floats, new_state = self.rule.update(floats, gradient, state)
            new_floats = self._cast_like(new_floats, floats, "weights")
            new_state = self._cast_like(new_state, state, "state")
            return Trained(with_floats(trained.encoded_weights, new_floats), encode(new_state), trained.name)

    def _cast_like(self, new: PyTree, old: PyTree, what: str) -> PyTree:
        """Return the new tree in the dtypes of the old one.

        Raises:
            ValueError: the rule changed the structure of the tree, or a shape.
        """
        if jax.tree.structure(new) != jax.tree.structure(old):
            raise ValueError(
                f"{self.name}: the rule returned {what} of another structure, {jax.tree.structure(new)}; expected "
                f"{jax.tree.structure(old)}"
            )

        def cast_leaf(new_leaf: jax.typing.ArrayLike, old_leaf: PyTree) -> PyTree:
            if not hasattr(old_leaf, "dtype"):
                return old_leaf
            new_array = jnp.asarray(new_leaf)
            if new_array.shape != old_leaf.shape:
                raise ValueError(
                    f"{self.name}: the rule returned {what} of the shape {new_array.shape}; expected {old_leaf.shape}"
                )
            return new_array.astype(old_leaf.dtype)

        return jax.tree.map(cast_leaf, new, old)


def _with_arrays(state: PyTree) -> PyTree:
    """Convert the Python numbers of an optimizer's state to arrays, so that they are not constants."""
    return jax.tree.map(lambda leaf: jnp.asarray(leaf) if isinstance(leaf, (bool, int, float)) else leaf, state)


# --- state in host memory --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StreamedUpdater(Updater):
    """An `Updater` that fetches one chunk of the state after another, and writes it back.

    Attributes:
        rule: update rule of the optimizer inside the stream.
        stream: the streamed optimizer, which stores the state.
    """

    rule: OptaxRule
    stream: StreamedOptimizer

    def _init_state(self, floats: PyTree) -> PyTree:
        self._check_dtypes(floats)
        return self.stream.init(floats)

    def _init_stack_state(self, floats: PyTree) -> PyTree:
        self._check_dtypes(jax.eval_shape(lambda stack: slice_layer(stack, 0), floats))
        # The device creates the state of one layer at a time.
        return jax.lax.map(self.stream.init, floats)

    def _store_state(self, floats: PyTree, state: PyTree) -> PyTree:
        self._check_dtypes(floats)
        return self.stream.store_state(floats, state)

    def _check_dtypes(self, floats: PyTree) -> None:
        """Raise ValueError if a state leaf for host memory is not an array of floats."""
        for path, spec in self.stream.planner.plan(floats).specs.items():
            is_encoded = not is_real_float(jax.ShapeDtypeStruct(spec.shape, spec.dtype))
            if spec.is_offloaded and is_encoded:
                raise ValueError(
                    f"{self.name}: its state {path} is {spec.dtype}, which a module stores as floats and cannot keep "
                    "in host memory; exclude it by the pattern= of `stream`"
                )

    def apply_update(self, trained: Trained, gradient: PyTree, later: PyTree) -> tuple[Trained, PyTree]:
        """See `Updater.apply_update`."""
        new_floats, new_state = self._compute_update(trained.floats, gradient, trained.state, 0)
        # State in host memory does not go through the barrier, whose operands are in device memory.
        new_floats, later = apply_barrier((new_floats, later))
        return Trained(with_floats(trained.encoded_weights, new_floats), encode(new_state), trained.name), later

    def get_layer(self, stack: Trained, index: jax.Array) -> Trained:
        """Return the weights only; see `Updater.get_layer`."""
        return stack.slice_weights(index)

    def apply_layer_update(
        self, stack: Trained, index: jax.Array, layer: Trained, gradient: PyTree, later: PyTree
    ) -> tuple[Trained, PyTree]:
        """See `Updater.apply_layer_update`."""
        new_floats, new_state = self._compute_update(layer.floats, gradient, stack.state, index)
        new_floats, later = apply_barrier((new_floats, later))
        new_weights = with_floats(stack.encoded_weights, write_layer(stack.floats, new_floats, index))
        return Trained(new_weights, encode(new_state), stack.name), later

    def _compute_update(
        self, floats: PyTree, gradient: PyTree, state: PyTree, index: jax.Array | int
    ) -> tuple[PyTree, PyTree]:
        """Return (new floats of one layer, the state of all layers with that layer's state updated)."""
        is_applied = all_finite(gradient) if self.skip_nonfinite else None

        def new_float(param: jax.Array, update: jax.Array) -> jax.Array:
            new_param = self.rule.add_updates(param, update)
            return new_param if is_applied is None else jnp.where(is_applied, new_param, param)

        # The RMS limit needs a whole tensor's update, so it cannot be applied slice by slice.
        is_sliced = self.rule.max_update_rms is None
        with jax.named_scope(f"update_{self.name}"):
            result = new_float if is_sliced else select_update
            results, new_state = self.stream.update_layer(gradient, state, floats, index, is_applied, result)
            new_floats = results if is_sliced else jax.tree.map(new_float, floats, results)
            return new_floats, new_state


# --- the mark in the traced program ----------------------------------------------------------------------------------


update_p = Primitive("plimsoll_update")
update_p.multiple_results = True


def mark_update(new: PyTree, name: str) -> PyTree:
    """Return the new weights and state of a module unchanged, marked in the traced program.

    Raises:
        ValueError: later, if the surrounding function is differentiated or batched.
    """
    leaves, structure = jax.tree.flatten(new)
    return jax.tree.unflatten(structure, update_p.bind(*leaves, module=name))


def apply_barrier(tree: PyTree) -> PyTree:
    """Pass the tree through a barrier, so that a consumer of any of its arrays waits for all of them."""
    leaves, structure = jax.tree.flatten(tree)
    # Cotangents of integers (float0) hold no data and are not arrays of the program.
    arrays = [leaf for leaf in leaves if leaf.dtype != jax.dtypes.float0]
    waiting = iter(jax.lax.optimization_barrier(arrays))
    tied_leaves = [leaf if leaf.dtype == jax.dtypes.float0 else next(waiting) for leaf in leaves]
    return jax.tree.unflatten(structure, tied_leaves)


def _return_arrays(*arrays: jax.Array, module: str) -> list[jax.Array]:
    return list(arrays)


def _lower(context: mlir.LoweringRuleContext, *arrays: PyTree, module: str) -> Sequence[PyTree]:
    return arrays


def _refuse_derivative(primals: Sequence[object], tangents: Sequence[object], *, module: str) -> NoReturn:
    raise ValueError(
        f"{module}: it is updated in the backward pass, which has no derivative of its own; take second derivatives of "
        "the plain function"
    )


def _refuse_batching(operands: Sequence[object], axes: Sequence[object], *, module: str) -> NoReturn:
    raise ValueError(
        f"{module}: jax.vmap over its backward pass would update the weights once per row of the batch; call jax.vmap "
        "inside the module instead, so that its weights get the sum of the rows' gradients"
    )


update_p.def_impl(_return_arrays)
update_p.def_abstract_eval(_return_arrays)
mlir.register_lowering(update_p, _lower)
ad.primitive_jvps[update_p] = _refuse_derivative
batching.primitive_batchers[update_p] = _refuse_batching
