"""Writes the keys of DeepSpeed's configuration, each with its default as JSON, one per line. Needs deepspeed.

    python3 tests/make_deepspeed_keys.py > tests/vectors/deepspeed_keys.txt
"""
import enum
import json
import os

os.environ["DS_ACCELERATOR"] = "cpu"
import deepspeed
from deepspeed.runtime import constants, precision_config
from deepspeed.runtime.zero import config, offload_config

SECTIONS = {
    "bf16": precision_config.DeepSpeedBF16Config,
    "fp16": precision_config.DeepSpeedFP16Config,
    "zero_optimization": config.DeepSpeedZeroConfig,
    "zero_optimization.offload_param": offload_config.DeepSpeedZeroOffloadParamConfig,
    "zero_optimization.offload_optimizer": offload_config.DeepSpeedZeroOffloadOptimizerConfig,
}
PARTS = ("BFLOAT16", "FP16", "TORCH_AUTOCAST_")  # of sections that have a class
# Constants of keys that stand below a section which has no class of its own; "" where the key is no part of a configuration.
BELOW = {
    "buffer_dtype": "", "param_dtype": "", "pipeline_stage": "", "vocabulary_size": "",
    "grad_accum_dtype": "data_types.", "keep_in_fp32_modules": "data_types.", "legacy_fusion": "optimizer.",
    "load_universal": "checkpoint.", "tag_validation": "checkpoint.", "use_node_local_storage": "checkpoint.",
}


def show(key, value):
    if isinstance(value, enum.Enum):
        value = value.value
    if isinstance(value, os.PathLike) or hasattr(value, "model_fields"):
        return
    print(key, json.dumps(value))


print("#", deepspeed.__version__)
for section, model in SECTIONS.items():
    for name, field in model.model_fields.items():
        key = f"{section}.{field.alias or name}"
        if key not in SECTIONS:
            show(key, field.get_default(call_default_factory=True))
for name in sorted(dir(constants)):
    key, default = getattr(constants, name), name + "_DEFAULT"
    if isinstance(key, str) and key.islower() and hasattr(constants, default) and not name.startswith(PARTS):
        section = BELOW.get(key)
        if section != "":
            show((section or "") + key, getattr(constants, default))
