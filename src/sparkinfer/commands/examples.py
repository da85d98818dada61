"""Examples at the end of the help of most commands. A test parses every line."""

_HEAD = "\b\nExamples:"


def _examples(*lines: str) -> str:
    """Formats lines so that click does not wrap them."""
    return "\n  ".join([_HEAD, *lines])


CONVERT = _examples(
    "sparkinfer convert CHECKPOINT -o model.gguf --outtype q8_0",
    "sparkinfer convert ORG/NAME -o model.gguf",
    "sparkinfer convert other.gguf -o model.gguf",
    "sparkinfer convert model.gguf -o sparse.gguf --predictors predictors",
)
CALIBRATE = _examples(
    "sparkinfer calibrate -o machine.json",
    "sparkinfer calibrate -o machine.json --gpu-from examples/machines/rtx-4060-8gb.json",
)
PROFILE = _examples(
    "sparkinfer profile model.gguf --corpus text.txt -o model.profile.safetensors",
    "sparkinfer profile model.gguf --corpus texts -o p.safetensors --train-predictors predictors",
    "sparkinfer profile silu.gguf --corpus text.txt -o p.safetensors --perplexity-budget 0.01",
    "sparkinfer profile --merge a.safetensors b.safetensors -o both.safetensors",
)
SOLVE = _examples(
    "sparkinfer solve model.gguf --profile p.safetensors --machine machine.json -vb 8GiB -o plan.gguf",
    "sparkinfer solve model.gguf --profile p.safetensors --machine machine.json -vb 0 -o plan.gguf",
    "sparkinfer solve model.gguf --profile p.safetensors --machine machine.json"
    " --sweep 2GiB:24GiB -o curve.json",
)
ADVISE = _examples(
    "sparkinfer advise model.gguf --corpus text.txt",
    "sparkinfer advise model.gguf --corpus text.txt --limits limits.safetensors --plot points.png",
    "sparkinfer advise trained.gguf --dense model.gguf --corpus text.txt",
)
SPARSIFY = _examples(
    "sparkinfer sparsify CHECKPOINT --corpus text.txt -o sparse.gguf",
    "sparkinfer sparsify CHECKPOINT --corpus text.txt -o sparse.gguf --share 0.6 --share 0.75",
)
GENERATE = _examples(
    'sparkinfer generate model.gguf -p "Once upon a time" -n 200',
    "sparkinfer generate model.gguf --split plan.gguf -f prompt.txt",
    'sparkinfer generate model.gguf --chat -p "What is a neuron?" --temp 0',
    "sparkinfer generate model.gguf --prompts prompts.txt --json",
)
CHAT = _examples(
    "sparkinfer chat model.gguf",
    'sparkinfer chat model.gguf -sys "Answer in one sentence." -c 4096',
)
SERVE = _examples(
    "sparkinfer serve model.gguf",
    "sparkinfer serve model.gguf --port 8000 --parallel 8 -c 4096",
)
EVAL = _examples(
    "sparkinfer eval model.gguf --corpus held-out.txt",
    "sparkinfer eval model.gguf --split plan.gguf --corpus held-out.txt --tokens 4096",
)
INSPECT = _examples(
    "sparkinfer inspect model.gguf --tensors",
    "sparkinfer inspect CHECKPOINT --json",
    "sparkinfer inspect model.gguf --graph --split plan.gguf",
)
EXPORT = _examples(
    "sparkinfer export plan.gguf --profile p.safetensors --format gpuidx -o out.gpuidx",
    "sparkinfer export p.safetensors --format powerinfer-activations -o activation",
)
DOCTOR = _examples("sparkinfer doctor", "sparkinfer doctor --report report.txt")
