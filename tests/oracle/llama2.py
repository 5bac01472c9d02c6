"""One handwritten training step of Llama 2 in plain JAX, as a reference for the planner's figures.

The shape is from arXiv 2307.09288. Weights are bf16; master weights and AdamW's moments (arXiv 1711.05101) are f32, so
14 bytes per parameter. Each matrix is sharded over the chips along its side of size D, and gathered by the layer that
needs it (arXiv 1910.02054). A layer saves only its input for the backward pass. The cross-entropy computes its gradient
one chunk of positions at a time. `python tests/oracle/llama2.py` prints the bytes of the 7B step on 16 v5e chips.

Axis letters: B sequences, S positions, N heads, H channels of a head, D width, F hidden width, V vocabulary, L layers.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

Tree = dict[str, Any]
CLIP, B1, B2, EPS, DECAY = 1.0, 0.9, 0.95, 1e-8, 0.1
HEAD_CHUNK = 1024  # tokens per chip whose logits exist at the same time


@dataclass(frozen=True)
class Llama:
    """The model, the dtype of weights and activations, and the learning-rate schedule."""

    layers: int = 32
    dim: int = 4096
    heads: int = 32
    hidden: int = 11008
    vocab: int = 32000
    dtype: Any = jnp.bfloat16
    rate: float = 3e-4
    warmup: int = 2000
    steps: int = 500_000

    def state(self, mesh: Mesh) -> Tree:
        """Return the state as ShapeDtypeStructs: weights, master weights, two moments, and the number of updates."""
        L, D, F, V = self.layers, self.dim, self.hidden, self.vocab

        def array(shape: tuple[int, ...], dtype: Any, cut: int | None = None) -> jax.ShapeDtypeStruct:
            axes = [None if axis != cut else "fsdp" for axis in range(len(shape))]
            return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*axes)))

        def weights(dtype: Any) -> Tree:
            into = {"q": D, "k": D, "v": D, "gate": F, "up": F}
            layer = {name: array((L, D, size), dtype, cut=1) for name, size in into.items()}
            layer |= {name: array((L, size, D), dtype, cut=2) for name, size in {"o": D, "down": F}.items()}
            layer |= {name: array((L, D), dtype) for name in ("attention_norm", "mlp_norm")}
            table = array((V, D), dtype, cut=1)
            return {"embed": table, "layer": layer, "norm": array((D,), dtype), "head": table}

        wide = {name: weights(jnp.float32) for name in ("master", "mean", "square")}
        return {"weights": weights(self.dtype), **wide, "count": array((), jnp.int32)}


def shard(mesh: Mesh, x: jax.Array, *axes: str | None) -> jax.Array:
    """Constrain the sharding of x over the chips; without axes, x is replicated."""
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*axes)))


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Return x / rms(x) * scale, computed in f32 and cast to x's dtype."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + 1e-5)
    return (wide * scale.astype(jnp.float32)).astype(x.dtype)


def rotate(x_BSNH: jax.Array) -> jax.Array:
    """Apply rotary positions (arXiv 2104.09864) in f32; element i is paired with element i + H/2."""
    _, S, _, H = x_BSNH.shape
    angle = jnp.arange(S)[:, None, None] * 10_000.0 ** (-jnp.arange(0, H, 2, dtype=jnp.float32) / H)
    a, b = jnp.split(x_BSNH.astype(jnp.float32), 2, axis=-1)
    turned = a * jnp.cos(angle) - b * jnp.sin(angle), a * jnp.sin(angle) + b * jnp.cos(angle)
    return jnp.concatenate(turned, axis=-1).astype(x_BSNH.dtype)


def attention(mesh: Mesh, q_BSNH: jax.Array, k_BSNH: jax.Array, v_BSNH: jax.Array) -> jax.Array:
    """Causal attention; on TPU with the flash kernel that comes with JAX, each chip on its own sequences."""
    if mesh.devices.flat[0].platform != "tpu":
        return jax.nn.dot_product_attention(q_BSNH, k_BSNH, v_BSNH, is_causal=True)
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    _, S, N, H = q_BSNH.shape
    names = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")
    blocks: Tree = {f"block_{name}": min(512, S) for name in names}
    mask = splash.MultiHeadMask([splash.CausalMask((S, S))] * N)
    kernel: Any = splash.make_splash_mha(mask, block_sizes=splash.BlockSizes(**blocks), head_shards=1, q_seq_shards=1)

    @partial(jax.shard_map, mesh=mesh, in_specs=(P("fsdp"),) * 3, out_specs=P("fsdp"), check_vma=False)
    def local(*qkv: jax.Array) -> jax.Array:
        return jax.vmap(kernel)(*(x.swapaxes(1, 2) for x in qkv)).swapaxes(1, 2)

    return local((q_BSNH.astype(jnp.float32) * H**-0.5).astype(q_BSNH.dtype), k_BSNH, v_BSNH)


def block(model: Llama, mesh: Mesh, x_BSD: jax.Array, w: Tree) -> jax.Array:
    """Apply one layer, given its slice of the weights."""
    w = jax.tree.map(partial(shard, mesh), w)
    B, S, D = x_BSD.shape
    h = rms_norm(x_BSD, w["attention_norm"])
    q, k, v = ((h @ w[name]).reshape(B, S, model.heads, -1) for name in "qkv")
    x_BSD = x_BSD + attention(mesh, rotate(q), rotate(k), v).reshape(B, S, D) @ w["o"]
    h = rms_norm(x_BSD, w["mlp_norm"])
    return shard(mesh, x_BSD + (jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"], "fsdp")


def head(mesh: Mesh, h_BSD: jax.Array, table_VD: jax.Array, batch: Tree) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the mean cross-entropy and its gradients with respect to h and the table, chunk by chunk.

    The gradient with respect to the logits is softmax minus one-hot.
    """
    table = shard(mesh, table_VD)
    B, S, _ = h_BSD.shape
    chunks = max(1, B // mesh.size * S // HEAD_CHUNK)

    def split(x: jax.Array) -> jax.Array:
        return shard(mesh, jnp.moveaxis(x.reshape(B, chunks, S // chunks, *x.shape[2:]), 1, 0), None, "fsdp")

    def chunk(carry: tuple[jax.Array, jax.Array], xs: tuple[jax.Array, ...]) -> tuple[Any, jax.Array]:
        (loss, dtable), (h, targets, share) = carry, xs
        logits = jnp.einsum("bsd,vd->bsv", h, table, preferred_element_type=jnp.float32)
        log_sum = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        hit = targets[..., None] == jnp.arange(logits.shape[-1])
        loss += jnp.sum(share * (log_sum[..., 0] - jnp.sum(jnp.where(hit, logits, 0.0), axis=-1)))
        dlogits = ((jnp.exp(logits - log_sum) - hit) * share[..., None]).astype(h.dtype)
        dtable += jnp.einsum("bsv,bsd->vd", dlogits, h)
        return (loss, shard(mesh, dtable, None, "fsdp")), dlogits @ table

    share = batch["weights"] / jnp.maximum(batch["weights"].sum(), 1.0)
    start = jnp.float32(0.0), shard(mesh, jnp.zeros(table.shape, jnp.float32), None, "fsdp")
    (loss, dtable), dh = jax.lax.scan(chunk, start, (split(h_BSD), split(batch["targets"]), split(share)))
    return loss, jnp.moveaxis(dh, 0, 1).reshape(h_BSD.shape), dtable.astype(table_VD.dtype)


def train_step(model: Llama, mesh: Mesh, state: Tree, batch: Tree) -> tuple[Tree, Tree]:
    """Return (new state, {"loss", "norm"}); the batch has tokens, targets and weights, [B, S] each."""
    weights = state["weights"]

    def body(embed: jax.Array, layer: Tree) -> jax.Array:
        x_BSD = shard(mesh, jnp.take(shard(mesh, embed), batch["tokens"], axis=0), "fsdp")
        one = jax.checkpoint(partial(block, model, mesh), prevent_cse=False)
        return jax.lax.scan(lambda x, w: (one(x, w), None), x_BSD, layer)[0]

    x_BSD, pull_body = jax.vjp(body, weights["embed"], weights["layer"])
    h_BSD, pull_norm = jax.vjp(rms_norm, x_BSD, weights["norm"])
    loss, dh_BSD, dhead = head(mesh, h_BSD, weights["head"], batch)
    dx_BSD, dnorm = pull_norm(dh_BSD)
    grads = {**dict(zip(("embed", "layer"), pull_body(dx_BSD), strict=True)), "norm": dnorm, "head": dhead}
    norm = jnp.sqrt(sum(jnp.sum(g.astype(jnp.float32) ** 2) for g in jax.tree.leaves(grads)))
    new = adamw(model, state, grads, jnp.minimum(1.0, CLIP / norm))
    good = jnp.isfinite(norm) & jnp.isfinite(loss)
    return jax.tree.map(lambda n, o: jnp.where(good, n, o), new, state), {"loss": loss, "norm": norm}


def adamw(model: Llama, state: Tree, grads: Tree, factor: jax.Array) -> Tree:
    """Return the state after an AdamW update with `factor` times the gradients; norm scales have no weight decay."""

    def leaf(path: Any, g: jax.Array, master: jax.Array, mean: jax.Array, square: jax.Array) -> Tree:
        count = state["count"]
        done = jnp.clip((count - model.warmup) / (model.steps - model.warmup), 0.0, 1.0)
        cosine = 0.1 + 0.9 * 0.5 * (1.0 + jnp.cos(jnp.pi * done))
        rate = model.rate * jnp.where(count < model.warmup, count / model.warmup, cosine)
        g = g.astype(jnp.float32) * factor
        mean, square = B1 * mean + (1 - B1) * g, B2 * square + (1 - B2) * g**2
        step = mean / (1 - B1 ** (count + 1)) / (jnp.sqrt(square / (1 - B2 ** (count + 1))) + EPS)
        master = master - rate * (step + (0.0 if "norm" in path[-1].key else DECAY) * master)
        return {"weights": master.astype(model.dtype), "master": master, "mean": mean, "square": square}

    new = jax.tree_util.tree_map_with_path(leaf, grads, state["master"], state["mean"], state["square"])
    kinds = jax.tree.structure(dict.fromkeys(state.keys() - {"count"}, 0))
    return {**jax.tree.transpose(jax.tree.structure(grads), kinds, new), "count": state["count"] + 1}


def compile_step(model: Llama, mesh: Mesh, sequences: int, length: int) -> Any:
    """Compile the step (state, batch) -> (state, metrics) for global batches [sequences, length]; state is donated."""
    state, rows = model.state(mesh), NamedSharding(mesh, P("fsdp"))
    dtypes = {"tokens": jnp.int32, "targets": jnp.int32, "weights": jnp.float32}
    batch = {name: jax.ShapeDtypeStruct((sequences, length), dtype, sharding=rows) for name, dtype in dtypes.items()}
    out = jax.tree.map(lambda leaf: leaf.sharding, state), NamedSharding(mesh, P())
    return jax.jit(partial(train_step, model, mesh), out_shardings=out, donate_argnums=0).lower(state, batch).compile()


def main() -> None:
    """Compile the 7B step ahead of time for 16 v5e chips, with one sequence of 4096 tokens each; print its bytes."""
    os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    jax.config.update("jax_platforms", "cpu")
    from jax.experimental import mesh_utils, topologies

    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:4x4").devices
    mesh = Mesh(mesh_utils.create_device_mesh((16,), devices), ("fsdp",))
    step = compile_step(Llama(), mesh, 16, 4096)
    memory = step.memory_analysis()
    print(json.dumps({"peak_bytes": memory.peak_memory_in_bytes - memory.host_argument_size_in_bytes}))


if __name__ == "__main__":
    main()
