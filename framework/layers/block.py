"""The pre-norm transformer block: x + attention(norm(x)), then x + mlp(norm(x)).

Gemma 2 applies a norm before and after each branch; OLMo 2 only after.
"""

from __future__ import annotations

import jax

from plimsoll.framework.config import Config, Fraction, PositiveFloat, PositiveInt, component, config_for
from plimsoll.framework.layers.attention import Attention
from plimsoll.framework.layers.base import Context, Layer, Out, scale
from plimsoll.framework.layers.mlp import MLP
from plimsoll.framework.layers.norm import LayerNorm, RMSNorm
from plimsoll.framework.layout import Nested


@component
class Block(Layer):
    """One transformer layer, applied to x_BSD; the residual stream stays in the compute dtype.

    Args:
        dim: D, the width of the residual stream; set by the parent.
        attention: config of the first branch.
        mlp: config of the second branch.
        norm: config of the norm before each branch; None for blocks that only norm the output of a branch.
        post_norm: config of a second norm, on each branch's output; none by default.
        branch_scale: factor on each branch's output (Granite: residual_multiplier); None for no scaling.
        dropout: dropout rate on each branch's output, in training.
        output_init_scale: factor on the initial weight of each branch's last projection; set by the stack.
    """

    def __init__(
        self,
        *,
        dim: PositiveInt,
        attention: Config = config_for(Attention),
        mlp: Config = config_for(MLP),
        norm: Config | None = config_for(RMSNorm),
        post_norm: Config | None = None,
        branch_scale: PositiveFloat | None = None,
        dropout: Fraction = 0.0,
        output_init_scale: float = 1.0,
    ):
        self.attention = attention.instantiate(dim=dim, output_init_scale=output_init_scale)
        self.mlp = mlp.instantiate(dim=dim, output_init_scale=output_init_scale)
        self.pre_norms: dict[str, RMSNorm | LayerNorm] = {}
        if norm is not None:
            for name in ("attention", "mlp"):
                self.pre_norms[f"{name}_norm"] = norm.instantiate(dim=dim)
        self.post_norms: dict[str, RMSNorm | LayerNorm] = {}
        if post_norm is not None:
            for name in ("attention", "mlp"):
                self.post_norms[f"{name}_post_norm"] = post_norm.instantiate(dim=dim)
        self.branch_scale = branch_scale
        self.dropout = dropout

    def children(self) -> dict[str, Layer]:
        """Return the two branches and their norms."""
        layers = {
            "attention_norm": self.pre_norms.get("attention_norm"),
            "attention": self.attention,
            "mlp_norm": self.pre_norms.get("mlp_norm"),
            "mlp": self.mlp,
            **self.post_norms,
        }
        return {name: layer for name, layer in layers.items() if layer is not None}

    @property
    def branches(self) -> dict[str, list[str]]:
        """The branches in the order in which they run: {branch: names of the children that it uses}."""
        children = self.children()
        branches = {}
        for name in ("attention", "mlp"):
            candidates = [f"{name}_norm", name, f"{name}_post_norm"]
            branches[name] = [child for child in candidates if child in children]
        return branches

    def branch(
        self, name: str, weights: Nested, x_BSD: jax.Array, ctx: Context, layer_state: Nested
    ) -> tuple[jax.Array, Out]:
        """Return the output of one branch in the compute dtype, to be added to x_BSD.

        Args:
            name: "attention" or "mlp".
            weights: the block's weights; those of the children that the branch uses are enough.
            x_BSD: the residual stream.
            ctx: the block's context.
            layer_state: the block's buffers.
        """
        branch = self.attention if name == "attention" else self.mlp
        with jax.named_scope(f"{name}_norm"):
            h_BSD = x_BSD
            if norm := self.pre_norms.get(f"{name}_norm"):
                h_BSD = norm(weights[f"{name}_norm"], x_BSD, ctx)
            # With two streams, the residual stream is wider than the compute dtype.
            h_BSD = h_BSD.astype(ctx.compute_dtype)
        with jax.named_scope(name):
            branch_state = layer_state.get(name, {})
            h_BSD, out = branch.apply(weights[name], h_BSD, ctx.fold(name), branch_state)
        if post_norm := self.post_norms.get(f"{name}_post_norm"):
            with jax.named_scope(f"{name}_post_norm"):
                h_BSD = post_norm(weights[f"{name}_post_norm"], h_BSD, ctx)
        if self.branch_scale is not None:
            h_BSD = scale(h_BSD, self.branch_scale)
        return ctx.dropout(h_BSD, self.dropout, name), out

    def apply(self, weights: Nested, carry: jax.Array, ctx: Context, layer_state: Nested) -> tuple[jax.Array, Out]:
        """Add both branches to x_BSD."""
        x_BSD = carry
        outs = {}
        for name in self.branches:
            h_BSD, outs[name] = self.branch(name, weights, x_BSD, ctx, layer_state)
            x_BSD = x_BSD + h_BSD
        return x_BSD, Out.merge(outs)
