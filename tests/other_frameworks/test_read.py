"""Reading runs of other frameworks: the framework, the fields, and what is wrong with a file."""

import json
import shlex
from pathlib import Path

import pytest

from plimsoll.extras.other_frameworks.foreign_run import Adapter, ForeignConfigError, ForeignMesh
from plimsoll.extras.other_frameworks.mapping import build_flags
from plimsoll.extras.other_frameworks.read import read_run
from plimsoll.extras.other_frameworks.shell_script import parse_flags, read_script


def test_megatron_script(folder: Path):
    run = read_run([folder / "pretrain.sh"])
    assert run.framework == "Megatron-LM"
    assert run.mesh == ForeignMesh(replicas=2, tensors=4)
    assert (run.rows, run.accumulate, run.seq_len, run.global_rows) == (2, 2, 8192, 8)
    shape = run.model.shape
    assert shape is not None
    assert (shape.layers, shape.dim, shape.heads, shape.kv_heads, shape.hidden) == (32, 4096, 32, 8, 16384)
    # The vocabulary and the end of a document, padded to a multiple of 128 for each of 4 devices.
    assert shape.vocab_size == 131584
    assert shape.learned_positions == 8192
    assert run.stored is not None
    assert (run.stored.state, run.stored.state_shards, run.stored.gradient) == (12, 2, 4)
    assert "lr" in run.skipped
    assert run.unknown == ()


def test_arguments_and_variables_override_a_script(folder: Path):
    path = folder / "pretrain.sh"
    run = read_run([path], ["--context-parallel-size=2", "--recompute-granularity", "full"])
    assert run.mesh == ForeignMesh(tensors=4, rows=2)
    assert run.remat == "full"
    assert read_run([path], ["TP=1"]).mesh == ForeignMesh(replicas=8)
    assert read_run([path], ["GPUS_PER_NODE=4"]).mesh == ForeignMesh(tensors=4)
    # The target's devices win, and the run says so.
    larger = read_run([path], devices=16)
    assert larger.mesh == ForeignMesh(replicas=4, tensors=4)
    assert any("starts 8 processes" in note for note in larger.notes)


def test_megatron_yaml_and_nemo(tmp_path: Path):
    arguments = tmp_path / "model_config.yaml"
    arguments.write_text(
        "MODEL_ARGS:\n  --num-layers: 8\n  --hidden-size: 1024\n  --num-attention-heads: 16\n  --seq-length: 2048\n"
        "  --micro-batch-size: 1\n  --global-batch-size: 16\n  --pipeline-model-parallel-size: 4\n  --bf16: true\n"
        "  --num-layers-per-virtual-pipeline-stage: 1\n  --vocab-size: 32000\n  --swiglu: true\n"
        "  --position-embedding-type: rope\n"
    )
    run = read_run([arguments])
    assert run.mesh == ForeignMesh(stages=4, chunks=2)
    assert run.model.shape is not None
    # Two thirds of four times the width, in multiples of 64.
    assert run.model.shape.hidden == 2688
    nemo = tmp_path / "nemo.yaml"
    nemo.write_text(
        "trainer:\n  devices: 8\n  num_nodes: 2\n  precision: bf16\nmodel:\n  micro_batch_size: 4\n"
        "  global_batch_size: 64\n  tensor_model_parallel_size: 2\n  encoder_seq_length: 4096\n"
        "  max_position_embeddings: ${.encoder_seq_length}\n  num_layers: 12\n  hidden_size: 768\n"
        "  num_attention_heads: 12\n  activations_checkpoint_granularity: full\n  vocab_size: 50257\n"
        "  optim:\n    name: distributed_fused_adam\n"
    )
    run = read_run([nemo])
    assert run.mesh == ForeignMesh(replicas=8, tensors=2)
    assert (run.remat, run.seq_len, run.accumulate) == ("full", 4096, 2)
    assert run.stored is not None
    assert run.stored.state_shards == 8


def test_torchtitan(folder: Path):
    run = read_run([folder / "job.toml"], ["--parallelism.tensor_parallel_degree=2"], devices=8)
    assert run.framework == "torchtitan"
    assert run.mesh == ForeignMesh(shards=4, tensors=2)
    assert (run.rows, run.seq_len, run.remat) == (4, 256, "full")
    assert run.precision == "float32 weights, bfloat16 products"
    assert "training.steps" in run.skipped


def test_recipe_with_accelerate(folder: Path):
    run = read_run([folder / "recipe.yaml", folder / "zero3.yaml"])
    assert run.framework == "Hugging Face Trainer"
    assert run.model.hub_id == "mistralai/Mistral-7B-v0.1"
    assert run.mesh == ForeignMesh(shards=8)
    assert (run.rows, run.accumulate, run.global_rows) == (4, 2, 64)
    assert run.precision == "bfloat16, float32 master"
    # The order of the files does not matter, and a recipe by itself has one device and its weights' dtype.
    assert read_run([folder / "zero3.yaml", folder / "recipe.yaml"]).mesh == run.mesh
    alone = read_run([folder / "recipe.yaml"])
    assert (alone.mesh, alone.precision) == (ForeignMesh(), "all bfloat16")


@pytest.mark.parametrize(
    ("stage", "words"), [(1, "gradients and weights are not"), (2, "weights are not"), (3, "sharded")]
)
def test_deepspeed_json_with_a_model(tmp_path: Path, stage: int, words: str):
    path = tmp_path / "ds.json"
    content = {"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}, "zero_optimization": {"stage": stage}}
    path.write_text(json.dumps(content))
    run = read_run([path], ["--model=meta-llama/Llama-2-7b-hf", "--max_length=4096"], devices=8)
    assert (run.rows, run.seq_len) == (2, 4096)
    assert run.stored is not None
    assert run.stored.state_shards == 8
    assert run.stored.gradient_shards == (1 if stage == 1 else 8)
    assert run.stored.parameter_shards == (8 if stage == 3 else 1)
    assert any(f"ZeRO-{stage}" in note and words in note for note in run.notes)
    with pytest.raises(ForeignConfigError, match=r"names no model; give --model"):
        read_run([path])


def test_offloading_is_read(tmp_path: Path):
    path = tmp_path / "ds.json"
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    path.write_text(json.dumps({"bf16": {"enabled": True}, "zero_optimization": zero}))
    run = read_run([path], ["--model=meta-llama/Llama-2-7b-hf", "--max_length=512"], devices=2)
    assert set(run.offloaded) == {"gradients", "optimizer_state", "parameters"}
    overrides = build_flags(run).overrides
    assert overrides["memory.update"] == "layer_programs"
    assert overrides["memory.parameters"] == "pinned_host"


def test_preferences_have_two_rows_a_pair_and_a_reference(folder: Path):
    recipe = (folder / "recipe.yaml").read_text() + "beta: 0.1\n"
    (folder / "recipe.yaml").write_text(recipe)
    run = read_run([folder / "recipe.yaml"])
    assert (run.objective, run.global_rows) == ("pairs with a reference", 16)
    (folder / "recipe.yaml").write_text(recipe + "use_peft: true\nlora_r: 8\n")
    run = read_run([folder / "recipe.yaml"])
    assert (run.objective, run.method) == ("pairs", "lora")


def test_axolotl(folder: Path):
    run = read_run([folder / "axolotl.yml"])
    assert run.framework == "axolotl"
    assert (run.method, run.optimizer, run.remat) == ("qlora", "adamw8bit", "full")
    assert run.adapter is not None
    assert (run.adapter.rank, run.adapter.targets) == (16, "attention/query|attention/value")
    flags = build_flags(run)
    assert flags.config == "qlora:meta-llama/Llama-3.2-1B"
    assert flags.overrides["learner.optimizer"] == "adamw8bit"
    assert flags.overrides["data.global_batch_size"] == "8"


def test_axolotl_reads_the_file_that_deepspeed_names(folder: Path):
    inner = folder / "examples"
    inner.mkdir()
    config = AXOLOTL_FULL + "deepspeed: deepspeed_configs/zero1.json\n"
    (inner / "full.yml").write_text(config)
    (folder / "deepspeed_configs").mkdir()
    zero = {"stage": 2, "reduce_bucket_size": 1000}
    (folder / "deepspeed_configs/zero1.json").write_text(json.dumps({"zero_optimization": zero}))
    run = read_run([inner / "full.yml"], devices=4)
    # The content of the file decides, not its name.
    assert run.stored is not None
    assert (run.stored.gradient_shards, run.stored.buffers) == (4, 2000)


AXOLOTL_FULL = """
base_model: NousResearch/Meta-Llama-3-8B
datasets: []
sequence_len: 512
micro_batch_size: 1
"""


def test_llama_factory(tmp_path: Path):
    path = tmp_path / "sft.yaml"
    path.write_text(
        "model_name_or_path: meta-llama/Llama-2-7b-hf\nquantization_bit: 4\nstage: sft\nfinetuning_type: lora\n"
        "lora_rank: 16\nlora_target: q_proj,v_proj\ndataset: identity\ntemplate: llama2\ncutoff_len: 4096\n"
        "per_device_train_batch_size: 2\ngradient_accumulation_steps: 8\nbf16: true\n"
    )
    run = read_run([path])
    assert run.framework == "LLaMA-Factory"
    assert (run.method, run.seq_len, run.rows, run.accumulate, run.remat) == ("qlora", 4096, 2, 8, "full")
    # Its default quantizes the scales too.
    assert run.adapter == Adapter(16, "attention/query|attention/value", double_quantized=True)
    assert run.unknown == ()
    plain = read_run([path], ["--double_quantization=false", "--lora_target=all", "--disable_gradient_checkpointing"])
    assert plain.adapter == Adapter(16)
    assert plain.remat == "none"
    full = read_run([path], ["--finetuning_type=full"])
    assert (full.method, full.precision) == ("full", "float32 weights, bfloat16 products")
    assert read_run([path], ["--finetuning_type=full", "--pure_bf16"]).precision == "all bfloat16"
    assert read_run([path], ["--stage=dpo"]).global_rows == 2 * 16
    full_dpo = read_run([path], ["--stage=dpo", "--finetuning_type=full"])
    assert full_dpo.objective == "pairs with a reference"
    assert read_run([path], ["--stage=dpo", "--finetuning_type=full", "--pref_loss=simpo"]).objective == "pairs"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--finetuning_type=freeze", "finetuning_type = 'freeze'; read are full and lora"),
        ("--stage=ppo", "stage = 'ppo'; read are pt, sft, rm, dpo, kto"),
        ("--quantization_bit=3", "quantization_bit = 3; read are 4 and 8"),
    ],
)
def test_runs_of_llama_factory_that_are_not_read(tmp_path: Path, words: str, message: str):
    path = tmp_path / "sft.yaml"
    path.write_text("model_name_or_path: meta-llama/Llama-2-7b-hf\nstage: sft\nfinetuning_type: lora\n")
    with pytest.raises(ForeignConfigError, match=message):
        read_run([path], [words])


def test_maxtext_script(folder: Path):
    run = read_run([folder / "v5p.sh"], devices=64)
    assert run.framework == "MaxText"
    assert run.mesh == ForeignMesh(shards=16, tensors=4)
    # A group of four devices computes the rows of four.
    assert (run.rows, run.global_rows) == (24, 384)
    shape = run.model.shape
    assert shape is not None
    # 32 is five doublings: one cycle of heads and MLPs, width, depth, then heads and MLPs, then the width.
    assert (shape.layers, shape.dim, shape.heads, shape.hidden) == (32, 8192, 64, 28672)
    assert run.remat == "save:query,key,value,output,mlp_gate,mlp_up,mlp_down"
    assert read_run([folder / "v5p.sh"], ["remat_policy=full"], devices=64).remat == "full"


def test_maxtext_yaml_with_a_base(tmp_path: Path):
    (tmp_path / "models").mkdir()
    (tmp_path / "models/llama2_7b.yml").write_text(
        'base_config: "base.yml"\nmodel_name: "llama2-7b"\nper_device_batch_size: 4\nmax_target_length: 4096\n'
    )
    (tmp_path / "top.yml").write_text('base_config: "models/llama2_7b.yml"\nremat_policy: "minimal_with_context"\n')
    run = read_run([tmp_path / "top.yml"], devices=8)
    assert run.model.hub_id == "meta-llama/Llama-2-7b-hf"
    assert (run.seq_len, run.rows) == (4096, 4)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("empty.yaml", "", "the file is empty"),
        ("two.yaml", "a: 1\n---\nb: 2\n", "2 YAML documents; expected one"),
        ("list.yaml", "- 1\n- 2\n", "YAML of a list; expected settings by name"),
        ("broken.yaml", "a: [1, 2\n", "not valid YAML"),
        ("broken.json", '{"a": }', "not valid JSON"),
        ("broken.toml", "[model\nname = 3", "not valid TOML"),
        ("other.yaml", "apiVersion: v1\nkind: Pod\n", "of no framework known here"),
        ("code.py", "print('hello')\n", "Python, which is not executed"),
        ("open.sh", "#!/bin/bash\nA='1\n", "a quote or a parenthesis is not closed"),
        ("nothing.sh", "#!/bin/bash\necho hello\n", "no command that trains a model"),
        ("grpo.yaml", "model_name_or_path: gpt2\nnum_generations: 8\n", "generates answers between its steps"),
        ("model.yaml", "model_name_or_path: someone/unknown\nmax_length: 8\n", "shape of the model 'someone/unknown'"),
        ("batch.yaml", "model_name_or_path: gpt2\nper_device_train_batch_size: x\n", "expected a number"),
        ("flavor.toml", '[model]\nname = "llama3"\nflavor = "9B"\n[training]\n', "known: llama3 1B"),
        ("nan.toml", '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nseq_len = nan\n', "expected a number"),
        ("infinite.yaml", "model_name_or_path: gpt2\nper_device_train_batch_size: .inf\n", "expected a number"),
        ("length.yaml", "model_name_or_path: gpt2\nmax_length: long\n", "max_length = 'long'; expected a number"),
        ("flag.json", '{"zero_optimization": {"stage": 2}, "bf16": true}', "expected a section of settings"),
        ("word.json", '{"zero_optimization": {"stage": 2, "offload_param": "cpu"}}', "expected a section of settings"),
        ("bucket.json", '{"zero_optimization": {"stage": 2, "reduce_bucket_size": "big"}}', "expected a number"),
        ("size.yaml", "distributed_type: FSDP\nparallelism_config: {parallelism_config_tp_size: x}\n", "a number"),
        ("fsdp.yaml", "distributed_type: FSDP\nfsdp_config: file.json\n", "expected a section of settings"),
        ("date.yaml", "model_name_or_path: gpt2\nwhen: 2020-13-45\n", "not valid YAML: month must be in 1..12"),
        ("deep.json", '{"a":' * 100_000, "nested too deeply"),
        ("object.yaml", "!!python/object/apply:os.system [exit]\n", "could not determine a constructor for the tag"),
        ("again.sh", "#!/bin/bash\n. ./again.sh\n", "more than 20 scripts source each other"),
        ("doubled.sh", "#!/bin/bash\nA='a word'\n" + 'A="$A $A"\n' * 40, "the value of A has more than 65,536"),
    ],
)
def test_wrong_files_give_one_line(tmp_path: Path, name: str, text: str, message: str):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ForeignConfigError) as error:
        read_run([path])
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert name in str(error.value)


SHARDED = "model_name_or_path: gpt2\nmax_length: 8\nfsdp: shard_grad_op auto_wrap\n"


@pytest.mark.parametrize(
    ("name", "text"),
    [("fsdp.json", '{"offload_params": true, "version": 2}'), ("fsdp.yaml", "fsdp_offload_params: true\n")],
)
def test_a_trainers_fsdp_config_may_be_a_file(tmp_path: Path, name: str, text: str):
    """transformers accepts the settings themselves, or the path of a file with them."""
    (tmp_path / "runs").mkdir()
    recipe = tmp_path / "runs" / "sft.yaml"
    recipe.write_text(f"{SHARDED}fsdp_config: {name}\n")
    with pytest.raises(
        ForeignConfigError, match=rf"sft\.yaml: fsdp_config names {name}, which was not found; expected"
    ):
        read_run([recipe], devices=4)
    (tmp_path / "runs" / name).write_text(text)
    run = read_run([recipe], devices=4)
    offloaded = ("parameters", "gradients", "optimizer_state")
    assert (run.offloaded, run.mesh) == (offloaded, ForeignMesh(shards=4))
    assert "fsdp_config" in run.read
    # The same as an argument of a script, in a folder above it.
    script = tmp_path / "runs" / "scripts" / "sft.sh"
    script.parent.mkdir()
    flags = f"--fsdp 'shard_grad_op auto_wrap' --fsdp_config {name}"
    script.write_text(f"#!/bin/bash\ntorchrun sft.py --model_name_or_path gpt2 --max_length 8 {flags}\n")
    assert read_run([script], devices=4).offloaded == offloaded
    inline = """--fsdp_config='{"offload_params": false}'"""
    assert read_run([script], shlex.split(inline), devices=4).offloaded == ()
    (tmp_path / "runs" / name).write_text("[1]")
    with pytest.raises(ForeignConfigError, match="expected settings by name"):
        read_run([recipe], devices=4)
    # Without fsdp, the Trainer does not read it.
    recipe.write_text("model_name_or_path: gpt2\nmax_length: 8\nfsdp_config: nowhere.json\n")
    assert read_run([recipe]).mesh == ForeignMesh()


def build_bomb(first: str, level: str) -> str:
    """Return YAML whose aliases stand for 9^30 values."""
    lines = ["model_name_or_path: gpt2", f"a0: &a0 {first}"]
    for index in range(1, 31):
        aliases = ", ".join([f"*a{index - 1}"] * 9)
        lines.append(f"a{index}: &a{index} {level.format(aliases)}")
    return "\n".join([*lines, "max_length: *a30", ""])


@pytest.mark.parametrize(
    "text", [build_bomb("[1]", "[{}]"), build_bomb("{x: 1}", "{{<<: [{}]}}")], ids=["lists", "merged"]
)
def test_yaml_that_expands_without_end_is_refused(text: str, tmp_path: Path):
    path = tmp_path / "bomb.yaml"
    path.write_text(text)
    with pytest.raises(ForeignConfigError, match=r"its aliases \(\*name\) repeat values, in all more than 100,000$"):
        read_run([path])


def test_aliases_are_read(tmp_path: Path):
    path = tmp_path / "run.yaml"
    path.write_text("model_name_or_path: gpt2\nrows: &rows 4\nper_device_train_batch_size: *rows\nmax_length: 8\n")
    assert read_run([path]).rows == 4


def test_wrong_files_that_are_not_there(tmp_path: Path):
    with pytest.raises(ForeignConfigError, match="no such file"):
        read_run([tmp_path / "missing.yaml"])
    with pytest.raises(ForeignConfigError, match="a folder"):
        read_run([tmp_path])


def test_sourced_files_that_are_not_text(tmp_path: Path):
    (tmp_path / "binary.sh").write_bytes(b"A=\xff\n")
    (tmp_path / "run.sh").write_text("#!/bin/bash\n. ./binary.sh\n")
    with pytest.raises(ForeignConfigError, match=r"binary\.sh cannot be read as text"):
        read_run([tmp_path / "run.sh"])


def test_variables_without_values_are_named(folder: Path):
    path = folder / "pretrain.sh"
    path.write_text(path.read_text().replace("--micro-batch-size 2", "--micro-batch-size $ROWS"))
    with pytest.raises(ForeignConfigError, match=r"--micro-batch-size is \$ROWS.*give ROWS=VALUE"):
        read_run([path])
    assert read_run([path], ["ROWS=1"]).rows == 1
    # $CHECKPOINTS has no value either, and changes nothing.
    assert "save" in read_run([path], ["ROWS=1"]).skipped


def test_settings_that_are_not_known_are_listed(folder: Path):
    path = folder / "axolotl.yml"
    path.write_text(path.read_text() + "activation_telepathy: true\n")
    assert read_run([path]).unknown == ("activation_telepathy",)


def test_parallel_sizes_have_to_divide_the_devices(folder: Path):
    with pytest.raises(ForeignConfigError, match="does not divide 6 devices"):
        read_run([folder / "pretrain.sh"], devices=6)
    with pytest.raises(ForeignConfigError, match="expected a target with that many"):
        read_run([folder / "job.toml"], ["--parallelism.data_parallel_shard_degree=3"], devices=8)


SCRIPT = """
A=1; B="two words"
export C=${A:-9} D=4
E=$((A + 2 * 3))
LIST=(--x 1 "--y 2")
LIST+=(--z ${MISSING:-fallback})
for SIZE in 7 8 9; do
  echo $SIZE
done
case "$A" in
  0) WHICH=zero ;;
  1|one) WHICH=one ;;
  *) WHICH=other ;;
esac
if [ -z "$UNSET" ]; then F=empty; fi
grep -q yes <<< "yes"
G=$((1 << 3))
cat > file.json << EOF
{"not": "read"}
EOF
. ./common.sh
run "${LIST[@]}" --size $SIZE --which=$WHICH --sum $E --text "$B" --sourced $SOURCED --f $F   # a comment
"""


def test_shell_scripts_are_expanded_and_not_executed(tmp_path: Path):
    (tmp_path / "common.sh").write_text("SOURCED=yes\ntouch touched\n")
    script = read_script(SCRIPT, "s.sh", folder=tmp_path)
    (words,) = [words for words in script.commands if words[0] == "run"]
    assert parse_flags(words, "s.sh") == {
        **{"x": "1", "y": "2", "z": "fallback", "size": "7", "which": "one", "sum": "7"},
        **{"text": "two words", "sourced": "yes", "f": "empty"},
    }
    assert not (tmp_path / "touched").exists()
