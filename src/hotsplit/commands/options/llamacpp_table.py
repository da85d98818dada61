"""What options of llama.cpp and PowerInfer mean here: one row for each meaning.

The options are those of llama-server, llama-cli and llama-completion (common/arg.cpp of llama.cpp as in
llama-cpp-python 0.3.36; tests/llamacpp/options.txt lists their names). An option that the command has
itself comes first; among rows, the first one that has the name and the command."""

from dataclasses import dataclass
from typing import Literal

Values = Literal["none", "one", "optional"]
Does = Literal[
    "same", "note", "refuse", "rename", "each", "layers", "device", "model", "file", "thinking"
]

TALKS = ("chat", "run")
TEXTS = ("generate", *TALKS)
TEXT_COMMANDS = (*TEXTS, "serve")
HUB_COMMANDS = (*TEXT_COMMANDS, "bench", "plan", "convert")
RUN_COMMANDS = (*TEXT_COMMANDS, "eval", "profile", "bench")
MODEL_COMMANDS = (*RUN_COMMANDS, "plan", "convert", "inspect", "solve", "report")


@dataclass(frozen=True, kw_only=True)
class Flag:
    """An option of another program or of another command, and what it does in `commands`.

    - "same": it is already what we do.
    - "note": it does not change the generated text, and is dropped with a note.
    - "refuse": `text` says what to do instead.
    - "rename": `text` is our spelling. "each": the same for every part between commas.
    - "model", "file": the value is the model, or names a file of that model's repository.
    - "layers", "device": a number of GPU layers, a device name.
    - "thinking": a variable of chat templates, by the option's name.

    A value in `usual` is already what we do."""

    does: Does
    values: Values = "none"
    commands: tuple[str, ...] = TEXT_COMMANDS
    text: str = ""
    usual: tuple[str, ...] = ()
    whose: str = "llama.cpp's"


def _same(values: Values = "none", commands: tuple[str, ...] = RUN_COMMANDS) -> Flag:
    return Flag(does="same", values=values, commands=commands)


def _note(
    text: str, values: Values = "none", commands: tuple[str, ...] = RUN_COMMANDS, usual: str = ""
) -> Flag:
    return Flag(
        does="note", values=values, commands=commands, text=text, usual=tuple(usual.split())
    )


def _refuse(
    text: str, values: Values = "none", commands: tuple[str, ...] = RUN_COMMANDS, usual: str = ""
) -> Flag:
    return Flag(
        does="refuse", values=values, commands=commands, text=text, usual=tuple(usual.split())
    )


def _rename(text: str, values: Values = "one", commands: tuple[str, ...] = TEXT_COMMANDS) -> Flag:
    return Flag(does="rename", values=values, commands=commands, text=text)


SERVE = ("serve",)
_PLAN = (
    "a plan decides what is on the GPU: hotsplit solve MODEL --profile P --machine M"
    " --vram-budget 8GiB -o PLAN, then --split PLAN; without a plan, everything is on the GPU if there"
    " is one"
)
_RUN_PLANS = (
    "run makes the plan itself: leave the option out, or give --vram SIZE for less of the GPU, and"
    " --device cuda:N for another one"
)
_VRAM_PLANS = (
    "a plan decides what is on the GPU: --vram 8GiB makes one, --split PLAN takes one of hotsplit solve;"
    " without a plan, everything is on the GPU if there is one"
)
PREPARING = ("generate", "chat", "serve", "bench")  # they have --vram, as run has
BUDGET = (
    "hotsplit run MODEL --vram 8GiB does everything within a budget; here the plan decides:"
    " hotsplit solve MODEL --profile P --machine M --vram-budget 8GiB -o PLAN, then --split PLAN"
)
_MEMORY = "weights are copied into memory if they fit, and stay in the mapped file otherwise"
_PASS = "the number of tokens in a pass is chosen automatically"
_LOG = "messages go to stderr, the text to stdout"
_THREADS = "thread placement is left to the system"
_DRAFT = "the draft model runs on the CPU, with the threads of -t"
_NO_DRAFTS = "the server drafts nothing"
_NO_IMAGES = "no model runs with images, sound or videos; give a text model without the option"
_ONE_MODEL = "a server has one model: start one for each, with its own --port"
_NO_TOOLS = "the server runs no tools and opens no files; clients run the tools that it calls"
_FIELD = "it is a field of each request"
_CHAT = "hotsplit generate MODEL --chat -p TEXT, or -f FILE"
_ROPE = (
    "rotary embeddings are computed as the model file says; --rope-scaling and --rope-scale change"
    " that"
)
_KEPT = "--kept says how many earlier texts stay in memory"
_WINDOWS = "layers with windows keep their windows, and states are kept where texts end and part"
_BLOCKS = "each text has --context tokens, in blocks that need no sorting"
_PRESET = "name the model instead, e.g. ORG/NAME-GGUF:Q4_K_M"
_NGRAMS = "n-grams of drafts have the lengths that were found best"

TABLE: tuple[tuple[str, Flag], ...] = (
    # ---- the program
    ("--usage", _rename("--help", "none", MODEL_COMMANDS)),
    ("--version", _refuse("hotsplit --version", commands=MODEL_COMMANDS)),
    ("-cl --cache-list", _refuse("hotsplit cache list shows what run has made")),
    ("--completion-bash", _refuse("hotsplit completion bash")),
    ("--list-devices", _refuse("hotsplit doctor shows them, and --device cuda:N takes one")),
    ("--server-base", _refuse("this command loads the model itself: give MODEL", "one")),
    ("-co --color", _note(_LOG, "optional")),
    (
        "-v --verbose --log-verbose --simple-io --log-disable --log-prefix"
        " --log-timestamps --no-log-prefix --no-log-timestamps --verbose-prompt",
        _note(_LOG),
    ),
    ("-lv --verbosity --log-verbosity --log-colors", _note(_LOG, "one")),
    ("--log-jsonl", _rename("--log-json", "none", SERVE)),
    ("--log-jsonl", _note("the report is JSON with --json")),
    ("--no-log-jsonl", _same()),
    ("--log-file", _refuse("messages go to stderr: end the command with 2> FILE", "one")),
    ("--log-prompts-dir", _note("prompts are not logged", "one")),
    ("-ptc --print-token-count", _note("the closing line has the number of tokens", "one")),
    ("--no-perf --perf --show-timings --no-show-timings", _note("speeds are in the closing line")),
    ("--offline", _refuse("set the variable HF_HUB_OFFLINE=1", commands=MODEL_COMMANDS)),
    ("-hft --hf-token", _refuse("put the token into the variable HF_TOKEN", "one", MODEL_COMMANDS)),
    # ---- the model
    ("-m --model", Flag(does="model", values="one", commands=MODEL_COMMANDS)),
    ("-hf -hfr --hf-repo -mu --model-url", Flag(does="model", values="one", commands=HUB_COMMANDS)),
    ("-hff --hf-file", Flag(does="file", values="one", commands=HUB_COMMANDS)),
    (
        "-hf -hfr --hf-repo -mu --model-url -hff --hf-file -dr --docker-repo",
        _refuse(
            "fetch and convert it first: hotsplit convert ORG/NAME -o model.gguf",
            "one",
            MODEL_COMMANDS,
        ),
    ),
    (
        "--gpt-oss-20b-default --gpt-oss-120b-default --embd-gemma-default --fim-qwen-1.5b-default"
        " --fim-qwen-3b-default --fim-qwen-7b-default --fim-qwen-7b-spec --fim-qwen-14b-spec"
        " --fim-qwen-30b-default --vision-gemma-4b-default --vision-gemma-12b-default",
        _refuse(_PRESET, commands=MODEL_COMMANDS),
    ),
    ("--no-mmproj --no-mmproj-auto", _same()),
    ("--mmproj-auto --mmproj-offload --no-mmproj-offload", _note("there are no images")),
    (
        "--image-min-tokens --image-max-tokens --mtmd-batch-max-tokens --video-fps"
        " --video-timestamp-interval --video-ffmpeg-dir",
        _note("there are no images", "one"),
    ),
    ("-mm --mmproj -mmu --mmproj-url --image --audio --video", _refuse(_NO_IMAGES, "one")),
    (
        "--lora --lora-scaled --control-vector --control-vector-scaled",
        _refuse(
            "adapters are not supported; merge them into the checkpoint and convert that", "one"
        ),
    ),
    (
        "--control-vector-layer-range --lora-init-without-apply",
        _refuse("adapters are not supported; leave it out"),
    ),
    (
        "--override-kv",
        _refuse(
            "the file's keys are used as they are; what -c, --rope-scaling and"
            " --rope-scale say of its context takes precedence",
            "one",
        ),
    ),
    ("--check-tensors", _note("convert compares what it writes with its source")),
    (
        "--rope-freq-base --rope-freq-scale --yarn-orig-ctx --yarn-ext-factor --yarn-attn-factor"
        " --yarn-beta-slow --yarn-beta-fast -gan --grp-attn-n -gaw --grp-attn-w",
        _refuse(_ROPE, "one"),
    ),
    # ---- memory and devices
    ("-ngl --gpu-layers --n-gpu-layers", Flag(does="layers", values="one", commands=RUN_COMMANDS)),
    (
        "-ngl --gpu-layers --n-gpu-layers",
        _refuse(
            "GPU memory is given in bytes, not in layers: --vram-budget 8GiB",
            "one",
            ("solve", "plan"),
        ),
    ),
    (
        "-ot --override-tensor -cmoe --cpu-moe -ncmoe --n-cpu-moe -ts --tensor-split -sm --split-mode"
        " -mg --main-gpu -nkvo --no-kv-offload -ncffn --n-cpu-ffn",
        _refuse(_RUN_PLANS, commands=("run",)),
    ),
    (
        "-ot --override-tensor -cmoe --cpu-moe -ncmoe --n-cpu-moe -ts --tensor-split -sm --split-mode"
        " -mg --main-gpu -nkvo --no-kv-offload -ncffn --n-cpu-ffn",
        _refuse(_VRAM_PLANS, commands=PREPARING),
    ),
    (
        "-ot --override-tensor -cmoe --cpu-moe -ncmoe --n-cpu-moe -ts --tensor-split -sm --split-mode"
        " -mg --main-gpu -nkvo --no-kv-offload -ncffn --n-cpu-ffn",
        _refuse(_PLAN),
    ),
    (
        "-vb --vram --vram-budget",
        Flag(
            does="refuse",
            commands=("eval",),
            text=BUDGET,
            whose="an option of commands that run a model",
        ),
    ),
    (
        "--reset-gpu-index --disable-gpu-index",
        Flag(
            does="refuse",
            commands=RUN_COMMANDS,
            whose="PowerInfer's",
            text="a plan is used only if --split names it, and solve --force replaces it",
        ),
    ),
    ("-dev", Flag(does="device", values="one", commands=RUN_COMMANDS)),
    (
        "-fit --fit",
        _note("a plan always fits its budget, and --vram says which", "one", usual="on"),
    ),
    (
        "-fitt --fit-target",
        _refuse("--vram SIZE says how much of the GPU to use", "one", TEXT_COMMANDS),
    ),
    ("-fitc --fit-ctx", _note("-c says how long the context is", "one")),
    (
        "--rpc",
        _refuse(
            "there are no remote devices; several GPUs of this machine: --vram once per GPU", "one"
        ),
    ),
    ("--no-host --op-offload --no-op-offload", _note("a plan decides what is computed where")),
    ("--mlock", _note(f"{_MEMORY}; they are not locked there")),
    ("--mmap --no-mmap", _note(_MEMORY)),
    ("-lm --load-mode -lzm --lazy-mode", _note(_MEMORY, "one")),
    ("-nr --no-repack --repack", _note("weights are arranged in memory for decoding")),
    (
        "-fa --flash-attn",
        Flag(
            does="note",
            values="optional",
            commands=RUN_COMMANDS,
            text="attention never stores all scores",
            usual=("", "on", "auto", "1"),
        ),
    ),
    ("-kvo", _same()),
    ("-dt --defrag-thold", _note(_BLOCKS, "one")),
    ("-kvu --kv-unified -no-kvu --no-kv-unified", _note(_BLOCKS)),
    ("--kv-unified-per-slot", _refuse("-c says how long each text may be", "one")),
    ("--swa-full", _note(_WINDOWS)),
    (
        "-ctxcp --ctx-checkpoints --swa-checkpoints -cms --checkpoint-min-step",
        _note(_WINDOWS, "one"),
    ),
    ("-cram --cache-ram", _note(_KEPT, "one", SERVE)),
    ("-cram --cache-ram", _note("there is one text", "one")),
    ("--cache-idle-slots --no-cache-idle-slots", _note(_KEPT, commands=SERVE)),
    # ---- speed
    ("-b --batch-size -ub --ubatch-size", _note(_PASS, "one")),
    ("-tb --threads-batch", _note("prompts use as many threads as generation does (-t)", "one")),
    (
        "--numa --prio --poll -C --cpu-mask -Cr --cpu-range --cpu-strict -Cb --cpu-mask-batch -Crb"
        " --cpu-range-batch --cpu-strict-batch --prio-batch --poll-batch",
        _note(_THREADS, "one"),
    ),
    ("--warmup", _note("only bench has warm-ups, and always")),
    (
        "-bs --backend-sampling --spec-draft-backend-sampling --no-spec-draft-backend-sampling",
        _note("tokens are drawn by the CPU"),
    ),
    ("-o --output", _refuse("the report's form is --json or --md", commands=("bench",))),
    (
        "-pg",
        _refuse(
            "a prompt and the tokens after it are two tests: -p N -n M -d N", commands=("bench",)
        ),
    ),
    # ---- drafts
    (
        "-md --model-draft --spec-draft-model --spec-draft-hf -hfd -hfrd --hf-repo-draft",
        _refuse("the server drafts nothing; hotsplit run and chat take -md", "one", SERVE),
    ),
    ("--spec-default", _note(_NO_DRAFTS, commands=SERVE)),
    (
        "--spec-type --spec-draft-n-max --spec-draft-n-min --spec-draft-p-min --draft-p-min"
        " --draft --draft-n --draft-max --draft-min --draft-n-min -lcs --lookup-cache-static"
        " -lcd --lookup-cache-dynamic --spec-ngram-size-n --spec-ngram-size-m --spec-ngram-min-hits",
        _note(_NO_DRAFTS, "one", SERVE),
    ),
    (
        "--spec-draft-model --spec-draft-hf -hfd -hfrd --hf-repo-draft",
        _rename("-md", commands=TEXTS),
    ),
    ("--spec-draft-n-max", _rename("--draft-max", commands=TEXTS)),
    ("--spec-draft-n-min", _rename("--draft-min", commands=TEXTS)),
    ("--spec-draft-p-min", _rename("--draft-p-min", commands=TEXTS)),
    ("--spec-default", _same(commands=TEXTS)),
    (
        "--spec-draft-threads -td --threads-draft --spec-draft-threads-batch -tbd --threads-batch-draft"
        " --spec-draft-cpu-mask -Cd --cpu-mask-draft --spec-draft-cpu-range -Crd --cpu-range-draft"
        " --spec-draft-cpu-strict --cpu-strict-draft --spec-draft-prio --prio-draft --spec-draft-poll"
        " --poll-draft --spec-draft-cpu-mask-batch -Cbd --cpu-mask-batch-draft"
        " --spec-draft-cpu-strict-batch --cpu-strict-batch-draft --spec-draft-prio-batch"
        " --prio-batch-draft --spec-draft-poll-batch --poll-batch-draft --spec-draft-type-k -ctkd"
        " --cache-type-k-draft --spec-draft-type-v -ctvd --cache-type-v-draft"
        " --spec-draft-override-tensor -otd --override-tensor-draft --spec-draft-n-cpu-moe"
        " --spec-draft-ncmoe -ncmoed --n-cpu-moe-draft --spec-draft-device -devd --device-draft"
        " --spec-draft-ngl -ngld --gpu-layers-draft --n-gpu-layers-draft",
        _note(_DRAFT, "one"),
    ),
    ("--spec-draft-cpu-moe -cmoed --cpu-moe-draft", _note(_DRAFT)),
    (
        "--spec-synth-len --spec-synth-rates --spec-draft-p-split --draft-p-split"
        " --spec-ngram-mod-n-min --spec-ngram-mod-n-max --spec-ngram-mod-n-match"
        " --spec-ngram-simple-size-n --spec-ngram-simple-size-m --spec-ngram-simple-min-hits"
        " --spec-ngram-map-k-size-n --spec-ngram-map-k-size-m --spec-ngram-map-k-min-hits"
        " --spec-ngram-map-k4v-size-n --spec-ngram-map-k4v-size-m --spec-ngram-map-k4v-min-hits",
        _note(_NGRAMS, "one"),
    ),
    # ---- texts
    ("--predict", _rename("--n-predict")),
    ("-cnv --conversation -i --interactive -if --interactive-first", _same(commands=TALKS)),
    (
        "-cnv --conversation -i --interactive -if --interactive-first",
        _refuse(
            "a conversation is a command of its own: hotsplit chat MODEL", commands=("generate",)
        ),
    ),
    ("-no-cnv --no-conversation", _same(commands=("generate", "run"))),
    (
        "-no-cnv --no-conversation",
        _refuse("to continue a text: hotsplit generate MODEL -p TEXT", commands=("chat",)),
    ),
    ("-st --single-turn", _refuse("for one answer: hotsplit generate MODEL --chat -p TEXT")),
    (
        "-p --prompt -f --file",
        Flag(
            does="refuse",
            values="one",
            commands=("chat",),
            text=_CHAT,
            whose="for a text, not for a conversation",
        ),
    ),
    ("-bf --binary-file", _refuse("texts are UTF-8: -f FILE", "one")),
    (
        "-o --output --output-file",
        _refuse("the text goes to stdout: end the command with > FILE", "one", TEXTS),
    ),
    ("--prompt-cache", _refuse("hotsplit generate MODEL takes it", "one", TALKS)),
    (
        "--prompt-cache-all --prompt-cache-ro",
        _refuse("--prompt-cache keeps only the prompt, never the text after it; leave it out"),
    ),
    ("--display-prompt", _same()),
    ("--no-display-prompt", _same(commands=("chat",))),
    ("--no-context-shift --no-escape --no-warmup", _same()),
    (
        "--context-shift",
        _refuse("an answer ends where its context is full; give a longer -c", commands=SERVE),
    ),
    ("--keep", _note("texts are never shortened here, but for the oldest turns of a chat", "one")),
    (
        "-np --parallel",
        _note("several texts: hotsplit generate --prompts FILE", "one", TEXTS, "1 -1"),
    ),
    ("-e --escape", _refuse("write the characters themselves: -p $'a\\nb' or -f FILE")),
    ("-mli --multiline-input", _refuse("Alt-Enter, or a backslash before Enter, makes a new line")),
    ("-sp --special", _note("special tokens are not printed")),
    (
        "--in-prefix --in-suffix",
        _refuse("the chat template writes what is around a message: --chat-template FILE", "one"),
    ),
    (
        "--in-prefix-bos",
        _refuse("the chat template writes what is around a message: --chat-template FILE"),
    ),
    ("--chat-template-file", _rename("--chat-template")),
    ("--jinja", _same()),
    ("--no-jinja", _note("chat templates are always Jinja's")),
    ("--ignore-eos", _refuse("hotsplit generate MODEL takes it", commands=("chat",))),
    (
        "--tfs --tfs-z",
        _refuse(
            "there is no tail-free sampling (llama.cpp has dropped it, too); --min-p cuts the tail",
            "one",
        ),
    ),
    ("--penalize-nl", _refuse("the newline is penalised like any token; leave the option out")),
    # ---- thoughts
    (
        "-rea --reasoning --reasoning-effort --reasoning-budget",
        Flag(
            does="thinking",
            values="one",
            usual=("auto", "default", "-1"),
            text="thoughts are not counted: 0 turns them off where the template can, and -n bounds the"
            " whole answer",
        ),
    ),
    ("--reasoning-budget-message", _note("thoughts are not counted", "one")),
    (
        "--reasoning-format",
        _refuse(
            'a request says it: "reasoning_format": "none"',
            "one",
            SERVE,
            "auto deepseek deepseek-legacy",
        ),
    ),
    (
        "--reasoning-format",
        _note(
            "thoughts are separate from the answer", "one", usual="auto deepseek deepseek-legacy"
        ),
    ),
    (
        "--reasoning-preserve --no-reasoning-preserve",
        _note("the chat template decides which earlier thoughts it repeats"),
    ),
    ("--no-skip-chat-parsing", _same()),
    ("--skip-chat-parsing", _refuse("/v1/completions answers with the plain text", commands=SERVE)),
    ("--skip-chat-parsing", _note("thoughts are separate from the answer")),
    # ---- the server
    ("-r --reverse-prompt", _refuse(f'{_FIELD}: "stop"', "one", SERVE)),
    ("--ignore-eos", _refuse(f'{_FIELD}: "ignore_eos"', commands=SERVE)),
    ("--grammar --grammar-file", _refuse(f'{_FIELD}: "grammar"', "one", SERVE)),
    ("-j --json-schema -jf --json-schema-file", _refuse(f'{_FIELD}: "json_schema"', "one", SERVE)),
    (
        "-cb --cont-batching --metrics --cache-prompt --prefill-assistant --ui --webui -no-ag --no-agent"
        " --no-ui-mcp-proxy --no-webui-mcp-proxy --no-slots",
        _same(commands=SERVE),
    ),
    ("-nocb --no-cont-batching", _refuse("-np 1 answers one request at a time", commands=SERVE)),
    (
        "--no-cache-prompt",
        _refuse(f'{_FIELD}: "cache_prompt": false; --kept 0 keeps no text', commands=SERVE),
    ),
    (
        "--no-prefill-assistant",
        _refuse(f'{_FIELD}: "continue_final_message": false', commands=SERVE),
    ),
    ("--cors-origins", Flag(does="each", values="one", commands=SERVE, text="--cors")),
    ("--cors-methods --cors-headers", _note("pages may send what the API takes", "one", SERVE)),
    (
        "--cors-credentials --no-cors-credentials",
        _note("a key is sent in a header", commands=SERVE),
    ),
    ("--no-ui --no-webui", _note("the page at / stays, and --api-key protects it", commands=SERVE)),
    (
        "--ui-config --webui-config --ui-config-file --webui-config-file",
        _note("the page at / keeps its own settings", "one", SERVE),
    ),
    ("--ui-mcp-proxy --webui-mcp-proxy -ag --agent", _refuse(_NO_TOOLS, commands=SERVE)),
    (
        "--tools --tools-runtime --mcp-servers-config --mcp-servers-json --media-path",
        _refuse(_NO_TOOLS, "one", SERVE),
    ),
    (
        "--path",
        _refuse(
            "the page at / is the program's; serve your own beside it, with --cors ORIGIN",
            "one",
            SERVE,
        ),
    ),
    (
        "--api-prefix",
        _refuse("put a proxy in front of the server that takes the prefix away", "one", SERVE),
    ),
    ("--api-key-file", _refuse("put the key into the variable HOTSPLIT_API_KEY", "one", SERVE)),
    (
        "--ssl-key-file --ssl-cert-file",
        _refuse("put a proxy in front of the server for TLS (docs/serve.md)", "one", SERVE),
    ),
    ("--embedding --embeddings", _note("/v1/embeddings is always there", commands=SERVE)),
    ("--pooling", _refuse("vectors are pooled as the model's file says", "one", SERVE)),
    ("--embd-normalize", _refuse("vectors have length 1", "one", SERVE, "2")),
    (
        "--rerank --reranking",
        _refuse("this server only generates and embeds texts", commands=SERVE),
    ),
    (
        "--spm-infill",
        _refuse("there is no /infill; /v1/completions takes the whole prompt", commands=SERVE),
    ),
    ("--cache-reuse", _note("prompts reuse what they begin with alike", "one", SERVE, "0")),
    (
        "-sps --slot-prompt-similarity",
        _note("prompts reuse what they begin with alike", "one", SERVE),
    ),
    ("--slots", _note("/metrics counts what runs and waits", commands=SERVE)),
    (
        "--slot-save-path",
        _refuse(
            "texts are kept in memory (--kept); hotsplit generate --prompt-cache"
            " keeps a prompt in a file",
            "one",
            SERVE,
        ),
    ),
    ("--props", _note("/props shows the defaults, which do not change", commands=SERVE)),
    ("--models-dir --models-preset --models-max", _refuse(_ONE_MODEL, "one", SERVE)),
    ("--models-autoload", _refuse(_ONE_MODEL, commands=SERVE)),
    ("--no-models-autoload", _same(commands=SERVE)),
    ("--tags", _note("models have no tags", "one", SERVE)),
    ("--reuse-port", _note("a port has one server", commands=SERVE)),
    ("--sse-ping-interval", _note("streams have no pings", "one", SERVE)),
    ("--threads-http", _note("requests are read by a few threads of their own", "one", SERVE)),
    ("--sleep-idle-seconds", _note("the model stays loaded", "one", SERVE, "-1")),
)


def flag_of(name: str, command: str) -> Flag | None:
    """The meaning of llama.cpp's option in a command; None if it has none."""
    for names, flag in TABLE:
        if name in names.split() and command in flag.commands:
            return flag
    return None
