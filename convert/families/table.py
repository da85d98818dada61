"""Which family reads which checkpoint. docs/adding-a-family.md says how to add one."""

from collections.abc import Callable, Mapping
from pathlib import Path

from sparkinfer.convert.blueprint import Blueprint
from sparkinfer.convert.config_reader import ConfigReader
from sparkinfer.convert.families.falcon import falcon
from sparkinfer.convert.families.llama import bamboo, llama, mistral, prosparse
from sparkinfer.convert.families.opt import opt
from sparkinfer.convert.families.phi import phi3
from sparkinfer.convert.families.qwen import qwen2, qwen3
from sparkinfer.errors import SparkinferError

# By `architectures` of config.json.
FAMILIES: dict[str, Callable[[ConfigReader], Blueprint]] = {
    "LlamaForCausalLM": llama,
    "SparseLlamaForCausalLM": prosparse,
    "MistralForCausalLM": mistral,
    "BambooForCausalLM": bamboo,
    "Qwen2ForCausalLM": qwen2,
    "Qwen3ForCausalLM": qwen3,
    "OPTForCausalLM": opt,
    "FalconForCausalLM": falcon,
    "RWForCausalLM": falcon,
    "Phi3ForCausalLM": phi3,
}


def read_blueprint(path: Path, config: Mapping[str, object]) -> Blueprint:
    """Raises SparkinferError, naming the key, for a model that would be computed wrongly.

    Only the config is read: Python that a checkpoint brings along is never run."""
    architectures = config.get("architectures")
    name = architectures[0] if isinstance(architectures, list) and architectures else None
    family = FAMILIES.get(name) if isinstance(name, str) else None
    if family is None:
        raise SparkinferError(
            f"{path}: architecture {name!r} is unknown; known: {', '.join(FAMILIES)}"
        )
    read = ConfigReader(path, config)
    read.refuse("quantization_config", why="its weights are packed; take the original checkpoint")
    return family(read)
