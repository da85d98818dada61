"""What llama.cpp's options are here, where they have another name or no meaning."""

from collections.abc import Sequence
from itertools import pairwise

_PLAN = (
    "what is on the GPU is said by a plan: sparkinfer solve MODEL --profile P --machine M"
    " --vram-budget 8GiB -o PLAN, then --split PLAN"
)
_CHAT = "for a conversation: sparkinfer chat MODEL"
_PASS = "how many tokens a pass takes is chosen by itself; leave it out"
_MEMORY = "weights are copied into memory where they fit, and stay in the file else; leave it out"
EXPLANATIONS = {
    **dict.fromkeys(("-ngl", "--gpu-layers", "--n-gpu-layers", "-ot", "--override-tensor",
                     "-cmoe", "-ncmoe", "--cpu-moe", "--n-cpu-moe", "-ts", "--tensor-split"), _PLAN),
    **dict.fromkeys(("-cnv", "--conversation", "-i", "--interactive"), _CHAT),
    **dict.fromkeys(("-no-cnv", "--no-conversation"),
                    "generate never talks, it continues the text; leave it out"),
    **dict.fromkeys(("-m", "--model"), "the model stands alone: sparkinfer generate MODEL -p ..."),
    **dict.fromkeys(("-b", "-ub", "--batch-size", "--ubatch-size"), _PASS),
    **dict.fromkeys(("-fa", "--flash-attn"), "attention never keeps all scores; leave it out"),
    **dict.fromkeys(("--mlock", "--no-mmap", "--mmap"), _MEMORY),
    **dict.fromkeys(("-e", "--escape"), "write the characters themselves: -p $'a\\nb' or -f FILE"),
    **dict.fromkeys(("-hf", "-hfr", "--hf-repo"),
                    "fetch and convert it first: sparkinfer convert ORG/NAME -o model.gguf"),
}  # fmt: skip
_TAKE_TEXT = ("-p", "--prompt", "-r", "--stop", "--reverse-prompt", "-sys", "--system")
_COMMANDS = ("generate", "chat")


def explanation_of(arguments: Sequence[str]) -> str | None:
    """Of the first of llama.cpp's options among the arguments of a command that writes texts."""
    if not arguments or arguments[0] not in _COMMANDS:
        return None
    for before, argument in pairwise(arguments):
        name = argument.partition("=")[0]
        if argument == "--":
            return None
        if name in EXPLANATIONS and before not in _TAKE_TEXT:
            return f"{name}: {EXPLANATIONS[name]}"
    return None
