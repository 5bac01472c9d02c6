"""Runs of other frameworks, as plans of ours: `plimsoll plan --from FILE`.

foreign_run.py      the typed description of a run
read.py             detects the framework of a file; shell_script, settings: how files are read
megatron.py, torchtitan.py, huggingface.py, axolotl.py, maxtext.py   one framework each
sharding.py         DeepSpeed, accelerate, FSDP
models.py           names of models, with model_names.json
mapping.py          the flags of ours that come nearest; shared with the public record of benchmarks
adjusted_report.py  the memory of a plan, as the other framework stores the state
"""
