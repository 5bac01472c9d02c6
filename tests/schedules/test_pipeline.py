"""Pipeline parallelism against one device, on eight: loss, metrics and updates; its schedule, memory and refusals."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

from plimsoll.framework.batch_transforms.reference import Reference
from plimsoll.framework.checkpoint.checkpointer import Checkpointer
from plimsoll.framework.config import Config, config_for
from plimsoll.framework.devices.mesh import AXES, MeshShape
from plimsoll.framework.layers.gated_delta_net import GatedDeltaNet
from plimsoll.framework.layers.mamba2 import Mamba2
from plimsoll.framework.layers.stack import Stack
from plimsoll.framework.layout import flatten
from plimsoll.framework.learner.rules import Rule
from plimsoll.framework.program.program import Program, inference_program
from plimsoll.framework.schedules.pipeline_shape import PipelineShape
from plimsoll.framework.schedules.pipeline_stages import exchange_chunks
from tests.schedules.test_sharding_equivalence import mixture_model
from tests.support import small
from tests.support.layers import Centering

SGD = config_for(optax.sgd, learning_rate=0.3, momentum=0.9)


# --- the schedule ----------------------------------------------------------------------------------------------------

SHAPES = [(2, 1, 4), (4, 1, 6), (4, 1, 2), (8, 1, 3), (2, 2, 4), (4, 2, 8), (3, 3, 6), (4, 4, 4)]


def list_work(shape: PipelineShape) -> tuple[dict[tuple[int, int], int], dict[tuple[int, int], int], np.ndarray]:
    """Return the tick of each (microbatch, chunk of the model), forward and backward, and the slots, [M, v P]."""
    ticks = jnp.arange(shape.num_ticks)[:, None]
    stages = jnp.arange(shape.stages)[None]
    forward: dict[tuple[int, int], int] = {}
    backward: dict[tuple[int, int], int] = {}
    slots = np.full((shape.microbatches, shape.chunks * shape.stages), -1)
    for times, work in ((forward, shape.forward_work(ticks, stages)), (backward, shape.backward_work(ticks, stages))):
        valid, microbatch, chunk, slot = (np.asarray(x) for x in (work.valid, work.microbatch, work.chunk, work.slot))
        for tick, stage in np.argwhere(valid):
            key = int(microbatch[tick, stage]), int(chunk[tick, stage]) * shape.stages + int(stage)
            assert key not in times, f"{key} runs twice"
            times[key] = int(tick)
            assert slots[key] in (-1, slot[tick, stage]), "the backward pass reads another slot"
            slots[key] = slot[tick, stage]
    return forward, backward, slots


@pytest.mark.parametrize(("stages", "chunks", "microbatches"), SHAPES)
def test_every_microbatch_goes_through_all_chunks_and_back(stages: int, chunks: int, microbatches: int):
    shape = PipelineShape(stages, chunks, microbatches)
    forward, backward, _ = list_work(shape)
    assert len(forward) == len(backward) == microbatches * chunks * stages
    for microbatch in range(microbatches):
        for chunk in range(1, chunks * stages):
            assert forward[microbatch, chunk] == forward[microbatch, chunk - 1] + 1
            assert backward[microbatch, chunk - 1] == backward[microbatch, chunk] + 1
        # The head is in between, in the same tick.
        assert backward[microbatch, chunks * stages - 1] == forward[microbatch, chunks * stages - 1]


@pytest.mark.parametrize(("stages", "chunks", "microbatches"), SHAPES)
def test_bubble(stages: int, chunks: int, microbatches: int):
    """Forward and backward both take v M + P - 1 ticks; without a bubble, they would take v M."""
    shape = PipelineShape(stages, chunks, microbatches)
    forward, backward, _ = list_work(shape)
    assert max(forward.values()) + 1 == chunks * microbatches + stages - 1
    assert min(backward.values()) == shape.first_backward_tick
    assert max(backward.values()) + 1 - min(backward.values()) == chunks * microbatches + stages - 1
    assert shape.num_ticks == max(backward.values()) + 1
    assert shape.idle_factor == (chunks * microbatches + stages - 1) / (chunks * microbatches)


@pytest.mark.parametrize(("stages", "chunks", "microbatches"), SHAPES)
def test_slots_are_not_overwritten_before_they_are_read(stages: int, chunks: int, microbatches: int):
    shape = PipelineShape(stages, chunks, microbatches)
    forward, backward, slots = list_work(shape)
    assert slots.max() < shape.num_slots
    for stage in range(stages):
        saved = {key: (forward[key], backward[key], slots[key]) for key in forward if key[1] % stages == stage}
        for key, (written, read, slot) in saved.items():
            for other, (other_written, _, other_slot) in saved.items():
                assert other == key or other_slot != slot or not written <= other_written <= read
    # In 1F1B, stage p has 2 (P - p) - 1 microbatches in flight, however many there are.
    if chunks == 1 and microbatches > 2 * stages:
        assert shape.num_slots == 2 * stages - 1


@pytest.mark.parametrize(("stages", "chunks"), [(2, 2), (4, 2), (2, 4), (4, 3), (8, 2)])
def test_chunks_move_to_the_stages_that_run_them_and_back(stages: int, chunks: int):
    sizes = [stages, *(1 for _ in AXES[1:])]
    mesh = Mesh(np.asarray(jax.devices()[:stages]).reshape(sizes), AXES)
    stored = np.arange(stages * chunks * 3).reshape(stages, chunks, 3)
    running = jax.jit(lambda x: exchange_chunks(x, mesh, to_stages=True))(stored)
    # Stage p runs the chunks p, P + p, 2 P + p, ... of the model.
    np.testing.assert_array_equal(running, stored.reshape(chunks, stages, 3).swapaxes(0, 1))
    np.testing.assert_array_equal(jax.jit(lambda x: exchange_chunks(x, mesh, to_stages=False))(running), stored)


# --- equal to one device ---------------------------------------------------------------------------------------------


def tied_model() -> Config:
    """Return GPT-2 with tied tables, dropout everywhere, and a buffer that each microbatch changes, in 8 repeats."""
    model = small.gpt2(stack__num_layers=16, embed__dropout=0.1, head__z_loss=1e-3)
    block = small.block(model).copy()
    block.dropout = 0.1
    model.stack.pattern = [block, config_for(Centering)]
    return model


def mixture() -> Config:
    """Return a model with 8 experts in each layer, and the losses of their routers."""
    model = mixture_model(None)
    model.stack.num_layers = 4
    return model


def dense_first() -> Config:
    """Return a model whose first layer is in a stack of its own, before the pipeline."""
    model = small.llama(stack__num_layers=4, embed__dropout=0.1)
    model.first = config_for(Stack, num_layers=1, pattern=[small.block(model).copy()])
    return model


def ring() -> Config:
    """Return a model whose keys travel around the devices of `seq`."""
    model = small.llama(stack__num_layers=4)
    small.block(model).attention.context_parallel = "ring"
    return model


def hybrid() -> Config:
    """Return a model of linear attention, whose states pass between more devices of `seq` than it has key heads."""
    model = small.llama(stack__num_layers=4)
    delta_net = small.block(model)
    state_space = delta_net.copy()
    delta_net.attention = config_for(GatedDeltaNet, num_heads=4, num_key_heads=2, key_dim=6, value_dim=5, chunk=4)
    state_space.attention = config_for(Mamba2, num_heads=4, num_groups=1, state_dim=6, head_dim=5, chunk=4)
    model.stack.pattern = [delta_net, state_space]
    return model


def exchanging_mixture() -> Config:
    """Return a mixture whose tokens travel to their experts, in several rounds."""
    model = mixture()
    for block in model.stack.pattern:
        block.mlp.experts.exchange = "all_to_all"
        block.mlp.experts.buffer_factor = 0.5
    return model


MODELS = {
    "ring": ring,
    "hybrid": hybrid,
    "exchanging mixture": exchanging_mixture,
    "tied": tied_model,
    "llama": lambda: small.llama(stack__num_layers=8, embed__dropout=0.1),
    "mixture": mixture,
    "dense first": dense_first,
}


def config(model: str, mesh: dict[str, int] | None = None, accumulate: int = 4, **fields: Any) -> Config:
    """Return an experiment with clipping and averages; SGD does not turn rounding errors into full updates."""
    fields = {"clip": 0.5, "ema": 0.9, "optimizer": SGD, **fields}
    return small.experiment(MODELS[model](), documents=True, mesh=mesh, accumulate=accumulate, **fields)


def assert_equal_runs(one: Program, pipeline: Program) -> None:
    """Assert that three steps and an evaluation do the same on one device and in a pipeline."""
    state, metrics = small.run(one, 3)
    pipeline_state, pipeline_metrics = small.run(pipeline, 3)
    pipeline.layout.check(pipeline_state)
    for expected, actual in zip(metrics, pipeline_metrics, strict=True):
        assert actual.keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_allclose(actual[name], value, rtol=2e-5, err_msg=name)
    for group in ("parameter", "optimizer", "ema", "buffer"):
        small.assert_close(small.arrays(pipeline_state[group]), small.arrays(state[group]), 2e-5)
    sums = one.evaluate(state, one.put(small.host_batch(one)), averaged=True)
    pipeline_sums = pipeline.evaluate(pipeline_state, pipeline.put(small.host_batch(pipeline)), averaged=True)
    assert pipeline_sums.keys() == sums.keys()
    for name, value in sums.items():
        np.testing.assert_allclose(pipeline_sums[name], value, rtol=2e-5, err_msg=name)


CASES = [
    ("tied", {"pipe": 2, "data": 2, "fsdp": 1, "model": 2}, 4, {"memory": {"remat": "full"}}),
    ("tied", {"pipe": 8, "fsdp": 1}, 8, {}),
    ("tied", {"pipe": 8, "fsdp": 1}, 1, {}),
    ("tied", {"pipe": 4, "fsdp": 2}, 2, {"memory": {"remat": "sqrt"}}),
    ("llama", {"pipe": 4, "fsdp": 2}, 4, {"memory": {"optimizer_state": "pinned_host"}}),
    ("llama", {"pipe": 2, "fsdp": 2, "model": 2}, 4, {"memory": {"remat": "save:query,mlp_up"}}),
    ("llama", {"pipe": 2, "fsdp": 2, "seq": 2}, 1, {}),
    ("llama", {"pipe": 2, "pipe_chunks": 4, "fsdp": 2, "model": 2}, 4, {}),
    ("tied", {"pipe": 4, "pipe_chunks": 2, "fsdp": 2}, 4, {"memory": {"remat": "full"}}),
    ("llama", {"pipe": 4, "fsdp": 2}, 2, {"rules": [config_for(Rule, pattern="^stack/", freeze=True)]}),
    ("mixture", {"pipe": 2, "fsdp": 4}, 2, {}),
    ("mixture", {"pipe": 2, "fsdp": 2, "expert": 2}, 2, {}),
    ("mixture", {"pipe": 2, "pipe_chunks": 2, "fsdp": 2, "model": 2}, 2, {}),
    ("exchanging mixture", {"pipe": 2, "fsdp": 2, "expert": 2}, 2, {}),
    ("ring", {"pipe": 2, "fsdp": 2, "seq": 2}, 2, {}),
    ("ring", {"pipe": 2, "pipe_chunks": 2, "seq": 4}, 2, {"memory": {"remat": "save:attention"}}),
    ("hybrid", {"pipe": 2, "seq": 4}, 2, {}),
    ("dense first", {"pipe": 4, "fsdp": 2}, 4, {}),
]


@pytest.mark.first(1)
@pytest.mark.parametrize(("model", "mesh", "accumulate", "fields"), CASES)
def test_steps_and_evaluations_equal_one_device(
    model: str, mesh: dict[str, int], accumulate: int, fields: dict[str, Any]
):
    one = small.program(config(model, None, accumulate, **fields))
    pipeline = small.program(config(model, mesh, accumulate, **fields))
    assert_equal_runs(one, pipeline)


@pytest.mark.pairs
@pytest.mark.parametrize(
    "mesh", [{"pipe": 4, "fsdp": 2}, {"fsdp": 4, "model": 2}, {"pipe": 2, "pipe_chunks": 2, "model": 2, "fsdp": 2}]
)
def test_checkpoints_move_between_meshes(tmp_path, mesh: dict[str, int]):
    first = small.program(config("llama", {"pipe": 2, "fsdp": 4}, 2))
    state, _ = small.run(first, 2)
    with Checkpointer(directory=tmp_path / "checkpoints") as checkpointer:
        assert checkpointer.save(2, first.backend.to_checkpoint(state), {})
    second = small.program(config("llama", mesh, 2))
    restored = Checkpointer(directory=tmp_path / "checkpoints").restore(2, second.backend.abstract_checkpoint)
    resumed = second.backend.from_checkpoint(restored.state)
    second.layout.check(resumed)
    small.assert_same_bits(resumed, state)
    batch = small.host_batch(first, 2)
    _, expected = first.step(state, first.put(batch))
    _, actual = second.step(resumed, second.put(batch))
    for name, value in expected.items():
        np.testing.assert_allclose(actual[name], value, rtol=2e-5, err_msg=name)


# --- memory and traffic ----------------------------------------------------------------------------------------------


def test_layers_and_vocabulary_are_sharded_over_the_stages():
    program = small.program(config("llama", {"pipe": 4, "fsdp": 2}))
    specs = flatten(program.layout.specs.parameter)
    shard = lambda path: program.layout.sharding(specs[path]).shard_shape(specs[path].shape)  # noqa: E731
    assert shard("stack/block0/mlp/up/weight") == (2, 16, 48)
    assert shard("embed/token") == shard("head/table") == (16, 16)
    moments = [leaf for leaf in program.layout if leaf.group == "optimizer" and leaf.path.endswith("mlp/up/weight")]
    assert [leaf.bytes_per_device for leaf in moments] == [2 * 16 * 48 * 4]


@pytest.mark.pairs
def test_saved_inputs_do_not_grow_with_the_number_of_microbatches():
    """A stage saves 2 P - 1 inputs; a backward pass after all forward passes would need one for each microbatch."""
    rows, length, width = 4, 16, 32

    def temporary_bytes(microbatches: int) -> int:
        config = small.experiment(
            small.llama(stack__num_layers=4),
            mesh={"pipe": 2, "fsdp": 4},
            batch=rows * microbatches,
            accumulate=microbatches,
            seq_len=length,
        )
        compiled = small.program(config).jit_step.compiled_step
        text = compiled.as_text()
        assert f"f32[3,1,1,{length},{width}]" in text, "the slots of one device: 2 P - 1, its stage, its row"
        assert f"f32[{microbatches},1,1,{length},{width}]" not in text
        return compiled.memory_analysis().temp_size_in_bytes

    few, many = temporary_bytes(8), temporary_bytes(32)
    # What grows are the tokens of the batch, in the order of the microbatches.
    token_bytes = 4 * 4 * length
    assert many - few <= 2 * (32 - 8) * token_bytes


@pytest.mark.pairs
@pytest.mark.parametrize("chunks", [1, 2])
def test_only_activations_travel_between_stages(chunks: int):
    """No device receives the layers of other stages; interleaving moves each weight to its stage once a step."""
    program = small.program(config("llama", {"pipe": 4, "pipe_chunks": chunks, "fsdp": 2}))
    text = program.jit_step.compiled_step.as_text()
    assert "collective-permute" in text
    for shape in ("[8,16,48]", "[8,32,48]", "[4,2,16,48]", "[4,2,32,48]"):
        assert f"f32{shape}" not in text, shape


# --- refusals --------------------------------------------------------------------------------------------------------


def shared_layers() -> Config:
    """Return a model with a layer that all repeats share."""
    model = small.llama(stack__num_layers=8)
    model.stack.pattern = [small.block(model), small.block(model).copy()]
    model.stack.shared = [1]
    return model


REFUSED = [
    ({"model": small.llama(stack__num_layers=6)}, r"mesh\.pipe = 4 does not divide the 6 layers .*nearest.*\[3, 6\]"),
    ({"pipe_chunks": 3}, r"mesh\.pipe \* mesh\.pipe_chunks = 12 does not divide the 8 layers .*\[8\]"),
    ({"pipe_chunks": 2, "accumulate": 2}, r"learner\.accumulate = 2.*in groups.*nearest learner\.accumulate: \[4\]"),
    ({"memory": {"update": "streamed"}}, r"memory\.update = streamed: .*expected memory\.update = after_backward"),
    ({"memory": {"update": "in_backward"}, "clip": None, "accumulate": 1}, r"memory\.update = in_backward"),
    ({"memory": {"update": "layer_programs"}}, r"memory\.update = layer_programs"),
    ({"memory": {"remat": "full:4,none"}}, r"memory\.remat = full:4,none: .*the same setting for all layers"),
    ({"memory": {"optimizer_state": "pinned_host:4"}}, r"memory\.optimizer_state = pinned_host:4"),
    ({"memory": {"remat": "sqrt:4"}}, r"groups of 4 do not divide the 2 repeats"),
    ({"memory": {"remat": "invert"}, "model": small.llama(stack__num_layers=8, stack__streams="float32")}, r"invert"),
    ({"scope": "model"}, r"learner\.scope = model"),
    ({"model": shared_layers()}, r"model\.stack\.shared"),
    ({"model": small.llama(stack__num_layers=8, vocab_size=66)}, r"mesh\.pipe = 4 does not divide vocab = 66"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED)
def test_refusals(fields: dict[str, Any], message: str):
    fields = {"model": small.llama(stack__num_layers=8), "accumulate": 4, **fields}
    mesh = {"pipe": 4, "fsdp": 2, "pipe_chunks": fields.pop("pipe_chunks", 1)}
    with pytest.raises(ValueError, match=message):
        small.program(small.experiment(mesh=mesh, **fields))


def test_models_next_to_the_trained_one_are_refused():
    experiment = small.experiment(small.llama(stack__num_layers=8), mesh={"pipe": 4, "fsdp": 2}).instantiate()
    experiment.batch_transform = Reference()
    with pytest.raises(ValueError, match=r"mesh\.pipe = 4 with batch_transform = Reference"):
        experiment.check_pipeline(4)


def test_inference_runs_on_another_mesh():
    experiment = small.experiment(small.llama(stack__num_layers=8), mesh={"pipe": 4, "fsdp": 2}).instantiate()
    messages: list[str] = []
    program = inference_program(experiment, host_weights=False, is_mesh_requested=False, log=messages.append)
    assert dict(program.mesh.shape) == {"pipe": 1, "data": 1, "fsdp": 8, "expert": 1, "seq": 1, "model": 1}
    assert messages == ["mesh.pipe = 4: only training runs in a pipeline; using mesh.fsdp = 8"]
    with pytest.raises(ValueError, match=r"mesh\.pipe = 4: only training runs in a pipeline"):
        inference_program(experiment, host_weights=False, is_mesh_requested=True, log=messages.append)


def test_chunks_need_stages():
    with pytest.raises(ValueError, match=r"pipe_chunks = 2 with pipe = 1: expected pipe over 1"):
        MeshShape(pipe_chunks=2)
