"""Answers to held-out prompts after a run on preference data: the data's answer, and the model's before and after.

"Before" is the model without its adapters if only the adapters were trained. If all weights were trained, the initial
weights no longer exist, so they are initialized or loaded once more in the memory of the trained ones.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import numpy as np

from plimsoll.framework.batch_transforms.auxiliary_model import auxiliary_experiment
from plimsoll.framework.batch_transforms.reference import without_adapters
from plimsoll.framework.data.pipeline import DataPipeline
from plimsoll.framework.files.workdir import Workdir
from plimsoll.framework.inference.generation import Generator
from plimsoll.framework.inference.sampling import Sampling
from plimsoll.framework.layers.head import LMHead
from plimsoll.framework.layout import TrainState
from plimsoll.framework.models.causal_lm import CausalLM
from plimsoll.framework.program.program import Program

FILE = "answers.jsonl"
_NUM_PROMPTS = 4
_MAX_TOKENS = 64
# Maximum number of characters of a text shown on a line.
_MAX_CHARACTERS = 60

# {"prompt", "data", "before", "after"} texts for each prompt; "before" is missing if the initial weights
# are unavailable.
AnswerTable = list[dict[str, str]]


@dataclass(frozen=True)
class HeldOutExample:
    """A held-out prompt and the data's answer to it, as tokens."""

    prompt: list[int]
    answer: list[int]


def answer_table(program: Program, state: TrainState) -> AnswerTable:
    """Return {"prompt", "data", "before", "after"} for some held-out prompts, with greedy answers.

    Every process takes part. The table is empty if the data has no preferences or the config asks for no samples.

    Args:
        program: the experiment on its mesh.
        state: the groups of weights, with whole stacks. Its arrays are deleted if the initial weights need their
            memory.
    """
    experiment = program.experiment
    data = experiment.data
    model = experiment.model
    if not isinstance(data, DataPipeline) or not isinstance(model, CausalLM) or not data.tokenizer.has_text:
        return []
    # Generation runs layer after layer, for which the layers of all stages would be gathered.
    if program.mesh.shape["pipe"] > 1:
        return []
    # A model that scores sequences does not generate answers.
    if not isinstance(model.head, LMHead) or not {"segments", "ends"} <= data.arrays().keys():
        return []
    if not experiment.trainer.sample_tokens or not data.validation_names:
        return []
    examples = select_examples(data)
    tokenizer = data.tokenizer
    num_tokens = min(experiment.trainer.sample_tokens, _MAX_TOKENS)
    limit = model.max_positions
    if limit is not None:
        # A sample is not worth an error at the end of a run.
        examples = [example for example in examples if len(example.prompt) + num_tokens <= limit]
    if not examples:
        return []
    prompts = [example.prompt for example in examples]
    sampling = Sampling(max_new_tokens=num_tokens, temperature=0.0, stop_ids=tuple(tokenizer.stop_ids))
    answers = {"after": Generator(program, state)(prompts, sampling)}
    if model.lora is not None:
        initial_state = replace(state, parameter=without_adapters(state.parameter))
        answers["before"] = Generator(program, initial_state)(prompts, sampling)
    else:
        for leaf in jax.tree.leaves(state):
            leaf.delete()
        initial_answers = _answer_with_initial_weights(program, prompts, sampling)
        if initial_answers is not None:
            answers["before"] = initial_answers
    table: AnswerTable = []
    for number, example in enumerate(examples):
        row = {"prompt": tokenizer.decode(example.prompt), "data": tokenizer.decode(example.answer)}
        for name in ("before", "after"):
            if name in answers:
                row[name] = tokenizer.decode(answers[name][number])
        table.append(row)
    return table


def _answer_with_initial_weights(
    program: Program, prompts: list[list[int]], sampling: Sampling
) -> list[list[int]] | None:
    """Return the answers of the model that the run started from; None if its weights are no longer available."""
    experiment = auxiliary_experiment(program.experiment, None)
    initial = Program(experiment, program.devices, mesh=experiment.mesh, training=False)
    if experiment.pretrained is None:
        state = initial.init()
    else:
        # The directory may have been removed since: a sample is not worth an error at the end of a run.
        try:
            state = experiment.pretrained.init(initial)
        except (OSError, ValueError):
            return None
    return Generator(initial, state)(prompts, sampling)


def select_examples(data: DataPipeline) -> list[HeldOutExample]:
    """Return the first sequence of evenly spaced rows of the first validation set, split after its prompt."""
    num_rows, read = data.evaluation_rows(data.validation_names[0])
    num_examples = min(num_rows, _NUM_PROMPTS)
    examples = []
    for number in range(num_examples):
        row = read(number * num_rows // num_examples)
        columns = np.flatnonzero(row["segments"] == 1)
        answer_columns = columns[row["weights"][columns] > 0]
        if not answer_columns.size:
            continue
        # Column c predicts the next token, so the first answer column holds the last token of the prompt.
        prompt = row["tokens"][columns[0] : answer_columns[0] + 1]
        examples.append(HeldOutExample(prompt.tolist(), row["targets"][answer_columns].tolist()))
    return examples


def table_lines(table: AnswerTable) -> list[str]:
    """Return the lines to show: the end of each prompt and the beginning of each answer."""
    lines = []
    for row in table:
        lines.append(f"held out: ...{row['prompt'][-_MAX_CHARACTERS:]!r}")
        for name in ("data", "before", "after"):
            if name in row:
                lines.append(f"  {name:6}  {row[name][:_MAX_CHARACTERS]!r}")
    return lines


def write_table(workdir: Workdir, table: AnswerTable) -> Path:
    """Write one line of JSON for each prompt; returns the file. Raises OSError."""
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in table)
    path = workdir.path / FILE
    path.write_text(text)
    return path
