"""Examples at the end of the help of most commands. A test parses every line."""

EXAMPLES = """
hotsplit convert CHECKPOINT -o model.gguf --outtype q8_0
hotsplit convert ORG/NAME -o model.gguf
hotsplit convert other.gguf -o model.gguf
hotsplit convert model.gguf -o sparse.gguf --predictors predictors
hotsplit calibrate -o machine.json
hotsplit calibrate -o machine.json --gpu-from rtx-4060-8gb
hotsplit profile model.gguf --corpus text.txt -o model.profile.safetensors
hotsplit profile model.gguf --corpus texts -o p.safetensors --train-predictors predictors
hotsplit profile --merge a.safetensors b.safetensors -o both.safetensors
hotsplit plan ORG/NAME --vram 8GiB --machine rtx-4060-8gb
hotsplit plan ORG/NAME-GGUF:Q4_K_M --machine rtx-3060-12gb+ddr5-5600
hotsplit plan model.gguf -c 32768
hotsplit solve model.gguf --profile p.safetensors --machine machine.json -vb 8GiB -o plan.gguf
hotsplit solve model.gguf --machine rtx-4060-8gb -vb 7GiB -o plan.gguf
hotsplit solve model.gguf --profile p.safetensors --machine machine.json --sweep 2GiB:24GiB -o\
 curve.json
hotsplit generate model.gguf -p "Once upon a time" -n 200
hotsplit generate model.gguf --split plan.gguf -f prompt.txt
hotsplit generate model.gguf --chat -p "What is a neuron?" --temp 0
hotsplit generate model.gguf --prompts prompts.txt --json
hotsplit chat model.gguf
hotsplit chat model.gguf -sys "Answer in one sentence." -c 4096
hotsplit serve model.gguf
hotsplit serve model.gguf --port 8000 --parallel 8 -c 4096
hotsplit eval model.gguf --corpus held-out.txt
hotsplit eval model.gguf --split plan.gguf --corpus held-out.txt --tokens 4096
hotsplit inspect model.gguf --tensors
hotsplit inspect CHECKPOINT --json
hotsplit inspect model.gguf --graph --split plan.gguf
hotsplit export plan.gguf --profile p.safetensors --format gpuidx -o out.gpuidx
hotsplit export p.safetensors --format powerinfer-activations -o activation
hotsplit export m.gguf --llama-cpp --split plan.gguf --profile p.safetensors --machine\
 machine.json
"""


def examples_of(command: str | None) -> str | None:
    """The examples of a command in a form that click does not wrap; None if it has none."""
    lines = [line for line in EXAMPLES.splitlines() if line.startswith(f"hotsplit {command} ")]
    return "\n  ".join(["\b\nExamples:", *lines]) if lines else None
