"""The table of families. docs/adding-a-family.md says how to add one."""

from importlib import import_module

from hotsplit.families.family import Architecture, Family

_NAMES = """
llama arcee mistral qwen opt falcon phi nemotron starcoder cohere gemma gemma3n gemma4
gemma4_assistant smollm olmo exaone ernie mixtures qwen_vl granite nemotron_h falcon_h1 lfm2 glm
glm_dense gpt_oss smallthinker delta_nets sigmoid_mixtures neox internlm hunyuan muse_glimmer
deepseek indexed kimi_linear flash_next
"""
MODULES = [import_module(f"hotsplit.families.{name}") for name in _NAMES.split()]
# By the first of `architectures` in config.json, and by llama.cpp's or PowerInfer's name.
FAMILIES: dict[str, Family] = {
    name: family for module in MODULES for family in module.FAMILIES for name in family.classes
}
ARCHITECTURES: dict[str, Architecture] = {
    graph.name: graph for module in MODULES for graph in module.GRAPHS
}
