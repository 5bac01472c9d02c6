"""Small runs in the syntax of each framework, written for these tests."""

from pathlib import Path

import pytest

MEGATRON = """#!/bin/bash
# A GPT of 7 billion parameters on one node.
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
TP=4
WORLD=$((GPUS_PER_NODE * 1))
MODEL=(
    --num-layers 32   # as in the paper
    --hidden-size 4096
    --num-attention-heads 32
    --group-query-attention --num-query-groups 8
    --untie-embeddings-and-output-weights
    --max-position-embeddings 8192
)
BATCH="--micro-batch-size 2 --global-batch-size 8 --seq-length 8192"
if [ "$TP" = "1" ]; then
    PARALLEL="--tensor-model-parallel-size 1"
elif [[ $TP -eq 4 ]]; then
    PARALLEL="--tensor-model-parallel-size ${TP}"
else
    PARALLEL="--tensor-model-parallel-size 99"
fi
torchrun --nproc_per_node $GPUS_PER_NODE --nnodes 1 pretrain_gpt.py ${MODEL[@]} $BATCH $PARALLEL \\
    --use-distributed-optimizer --bf16 --lr 1e-4 --train-iters 10 \\
    --tokenizer-type NullTokenizer --vocab-size 131073 --save $CHECKPOINTS
"""
TORCHTITAN = """
[model]
name = "llama3"
flavor = "debugmodel"

[training]
local_batch_size = 4
seq_len = 256
steps = 10

[parallelism]
data_parallel_shard_degree = -1

[activation_checkpoint]
mode = "full"
"""
RECIPE = """
model_name_or_path: mistralai/Mistral-7B-v0.1
torch_dtype: bfloat16
dataset_name: someone/chats
bf16: true
max_length: 2048
per_device_train_batch_size: 4
gradient_accumulation_steps: 2
gradient_checkpointing: true
learning_rate: 2e-5
"""
ACCELERATE = """
compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
deepspeed_config:
  zero_stage: 3
mixed_precision: bf16
num_processes: 8
"""
AXOLOTL = """
base_model: meta-llama/Llama-3.2-1B
datasets:
  - path: someone/instructions
    type: alpaca
adapter: qlora
load_in_4bit: true
lora_r: 16
lora_target_modules: [q_proj, v_proj]
sequence_len: 1024
sample_packing: true
micro_batch_size: 2
gradient_accumulation_steps: 4
optimizer: adamw_bnb_8bit
bf16: auto
gradient_checkpointing: true
"""
MAXTEXT = """
set -e
export EXECUTABLE="train"
for ARGUMENT in "$@"; do
    IFS='=' read -r KEY VALUE <<< "$ARGUMENT"
    export "$KEY"="$VALUE"
done
python3 -m maxtext.trainers.pre_train.$EXECUTABLE "${CONFIGS:-$PWD/configs}"/base.yml \\
    global_parameter_scale=32 per_device_batch_size=6 remat_policy=minimal steps=15\\
    ici_fsdp_parallelism=-1 ici_tensor_parallelism=4 max_target_length=2048 base_output_directory=$OUTPUT
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a run of each framework."""
    files = {
        "pretrain.sh": MEGATRON,
        "job.toml": TORCHTITAN,
        "recipe.yaml": RECIPE,
        "zero3.yaml": ACCELERATE,
        "axolotl.yml": AXOLOTL,
        "v5p.sh": MAXTEXT,
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    return tmp_path
