"""What options of llama.cpp and PowerInfer mean here: one row for each meaning.

The options are those of llama-server, llama-cli and llama-completion (common/arg.cpp of llama.cpp
as in llama-cpp-python 0.3.36; tests/llamacpp/options.txt lists their names). An option that the
command has itself comes first; among rows, the first one that has the name and the command."""

from dataclasses import dataclass
from typing import Literal

Values = Literal["none", "one", "optional"]
PREPARING = ("generate", "chat", "serve", "bench")  # they have --vram, as run has
_TALKS = ("chat", "run")
_TEXTS = ("generate", *_TALKS)
_WRITERS = (*_TEXTS, "serve")
_LOADERS = (*_WRITERS, "eval", "profile", "bench")
_COMMANDS = {
    "talks": _TALKS,
    "texts": _TEXTS,
    "writers": _WRITERS,
    "preparing": PREPARING,
    "hub": (*_WRITERS, "bench", "plan", "convert"),
    "models": (*_LOADERS, "plan", "convert", "inspect", "solve", "report"),
}


@dataclass(frozen=True, kw_only=True)
class Flag:
    """An option of another program or of another command, and what it does in `commands`.

    - "same": it is already what we do.
    - "note": it does not change the generated text, and is dropped with a note.
    - "refuse": `text` says what to do instead.
    - "rename": `text` is our spelling. "each": the same for every part between commas. "text": the
      same, but the value is a file with the text.
    - "model", "file": the value is the model, or names a file of that model's repository.
    - "layers", "device": a number of GPU layers, a device name.
    - "thinking": a variable of chat templates, by the option's name.

    A value in `usual` is already what we do."""

    does: str
    values: Values
    commands: tuple[str, ...]
    text: str
    usual: tuple[str, ...]
    whose: str


BUDGET = (
    "hotsplit run MODEL --vram 8GiB does everything within a budget; here the plan decides:"
    " hotsplit solve MODEL --profile P --machine M --vram-budget 8GiB -o PLAN, then --split PLAN"
)
# Texts of several rows.
_TEXT = {
    "$BUDGET": BUDGET,
    "$PLAN": "a plan decides what is on the GPU: hotsplit solve MODEL --profile P --machine M"
    " --vram-budget 8GiB -o PLAN, then --split PLAN; without a plan, everything is on the GPU if"
    " there is one",
    "$RUN_PLANS": "run makes the plan itself: leave the option out, or give --vram SIZE for less of"
    " the GPU, and --device cuda:N for another one",
    "$VRAM_PLANS": "a plan decides what is on the GPU: --vram 8GiB makes one, --split PLAN takes"
    " one of hotsplit solve; without a plan, everything is on the GPU if there is one",
    "$MEMORY": "weights are copied into memory if they fit, and stay in the mapped file otherwise",
    "$LOG": "messages go to stderr, the text to stdout",
    "$THREADS": "thread placement is left to the system",
    "$DRAFT": "the draft model runs on the CPU, with the threads of -t",
    "$NO_TOOLS": "the server runs no tools and opens no files; clients run the tools that it calls",
    "$ONE_MODEL": "a server has one model: start one for each, with its own --port",
    "$FIELD": "it is a field of each request",
    "$ROPE": "rotary embeddings are computed as the model file says; --rope-scaling and"
    " --rope-scale change that",
    "$KEPT": "--kept says how many earlier texts stay in memory",
    "$WINDOWS": "layers with windows keep their windows, and states are kept where texts end and"
    " part",
    "$BLOCKS": "each text has --context tokens, in blocks that need no sorting",
}

# names, with N or [N] if they take a value or may | what they do, in which commands (without one:
# those that load a model) | text | usual values, "-" for none | whose they are, if not llama.cpp's.
# An indented line continues the row before it.
_ROWS = """
# ---- the program
--usage | rename models | --help
--version | refuse models | hotsplit --version
-cl --cache-list | refuse | hotsplit cache list shows what run has made
--completion-bash | refuse | hotsplit completion bash
--list-devices | refuse | hotsplit doctor shows them, and --device cuda:N takes one
--server-base N | refuse | this command loads the model itself: give MODEL
-co --color [N] | note | $LOG
-v --verbose --log-verbose --simple-io --log-disable --log-prefix --log-timestamps --no-log-prefix
    --no-log-timestamps --verbose-prompt | note | $LOG
-lv --verbosity --log-verbosity --log-colors N | note | $LOG
--log-jsonl | refuse serve | a line of the log is plain text
--log-jsonl | note | the report is JSON with --json
--no-log-jsonl | same
--log-file N | refuse | messages go to stderr: end the command with 2> FILE
--log-prompts-dir N | note | prompts are not logged
-ptc --print-token-count N | note | the closing line has the number of tokens
--no-perf --perf --show-timings --no-show-timings | note | speeds are in the closing line
--offline | refuse models | set the variable HF_HUB_OFFLINE=1
-hft --hf-token N | refuse models | put the token into the variable HF_TOKEN
# ---- the model
-m --model N | model models
-hf -hfr --hf-repo -mu --model-url N | model hub
-hff --hf-file N | file hub
-hf -hfr --hf-repo -mu --model-url -hff --hf-file -dr --docker-repo N | refuse models | fetch and
    convert it first: hotsplit convert ORG/NAME -o model.gguf
--gpt-oss-20b-default --gpt-oss-120b-default --embd-gemma-default --fim-qwen-1.5b-default
    --fim-qwen-3b-default --fim-qwen-7b-default --fim-qwen-7b-spec --fim-qwen-14b-spec
    --fim-qwen-30b-default --vision-gemma-4b-default --vision-gemma-12b-default | refuse models |
    name the model instead, e.g. ORG/NAME-GGUF:Q4_K_M
--no-mmproj --no-mmproj-auto | same
--mmproj-auto --mmproj-offload --no-mmproj-offload | note | there are no images
--image-min-tokens --image-max-tokens --mtmd-batch-max-tokens --video-fps
    --video-timestamp-interval --video-ffmpeg-dir N | note | there are no images
-mm --mmproj -mmu --mmproj-url --image --audio --video N | refuse | no model runs with images,
    sound or videos; give a text model without the option
--lora --lora-scaled --control-vector --control-vector-scaled N | refuse | adapters are not
    supported; merge them into the checkpoint and convert that
--control-vector-layer-range --lora-init-without-apply | refuse | adapters are not supported; leave
    it out
--override-kv N | refuse | the file's keys are used as they are; what -c, --rope-scaling and
    --rope-scale say of its context takes precedence
--check-tensors | note | convert compares what it writes with its source
--rope-freq-base --rope-freq-scale --yarn-orig-ctx --yarn-ext-factor --yarn-attn-factor
    --yarn-beta-slow --yarn-beta-fast -gan --grp-attn-n -gaw --grp-attn-w N | refuse | $ROPE
# ---- memory and devices
-ngl --gpu-layers --n-gpu-layers N | layers
-ngl --gpu-layers --n-gpu-layers N | refuse solve plan | GPU memory is given in bytes, not in
    layers: --vram-budget 8GiB
-ot --override-tensor -cmoe --cpu-moe -ncmoe --n-cpu-moe -ts --tensor-split -sm --split-mode -mg
    --main-gpu -nkvo --no-kv-offload -ncffn --n-cpu-ffn | refuse run | $RUN_PLANS
-ot --override-tensor -cmoe --cpu-moe -ncmoe --n-cpu-moe -ts --tensor-split -sm --split-mode -mg
    --main-gpu -nkvo --no-kv-offload -ncffn --n-cpu-ffn | refuse preparing | $VRAM_PLANS
-ot --override-tensor -cmoe --cpu-moe -ncmoe --n-cpu-moe -ts --tensor-split -sm --split-mode -mg
    --main-gpu -nkvo --no-kv-offload -ncffn --n-cpu-ffn | refuse | $PLAN
-vb --vram --vram-budget | refuse eval | $BUDGET |  | an option of commands that run a model
--reset-gpu-index --disable-gpu-index | refuse | a plan is used only if --split names it, and solve
    --force replaces it |  | PowerInfer's
-dev N | device
-fit --fit N | note | a plan always fits its budget, and --vram says which | on
-fitt --fit-target N | refuse writers | --vram SIZE says how much of the GPU to use
-fitc --fit-ctx N | note | -c says how long the context is
--rpc N | refuse | there are no remote devices; several GPUs of this machine: --vram once per GPU
--no-host --op-offload --no-op-offload | note | a plan decides what is computed where
--mlock | note | $MEMORY; they are not locked there
--mmap --no-mmap | note | $MEMORY
-lm --load-mode -lzm --lazy-mode N | note | $MEMORY
-nr --no-repack --repack | note | weights are arranged in memory for decoding
-fa --flash-attn [N] | note | attention never stores all scores | - on auto 1
-kvo | same
-dt --defrag-thold N | note | $BLOCKS
-kvu --kv-unified -no-kvu --no-kv-unified | note | $BLOCKS
--kv-unified-per-slot N | refuse | -c says how long each text may be
--swa-full | note | $WINDOWS
-ctxcp --ctx-checkpoints --swa-checkpoints -cms --checkpoint-min-step N | note | $WINDOWS
-cram --cache-ram N | note serve | $KEPT
-cram --cache-ram N | note | there is one text
--cache-idle-slots --no-cache-idle-slots | note serve | $KEPT
# ---- speed
-b --batch-size -ub --ubatch-size N | note | the number of tokens in a pass is chosen automatically
-tb --threads-batch N | note | prompts use as many threads as generation does (-t)
--numa --prio --poll -C --cpu-mask -Cr --cpu-range --cpu-strict -Cb --cpu-mask-batch -Crb
    --cpu-range-batch --cpu-strict-batch --prio-batch --poll-batch N | note | $THREADS
--warmup | note | only bench has warm-ups, and always
-bs --backend-sampling --spec-draft-backend-sampling --no-spec-draft-backend-sampling | note |
    tokens are drawn by the CPU
-o --output | refuse bench | the report's form is a table or --json
-pg | refuse bench | a prompt and the tokens after it are two tests: -p N -n M -d N
# ---- drafts
-lcs --lookup-cache-static -lcd --lookup-cache-dynamic N | note serve | n-grams come from the text
    itself, or with --speculate ngram-mod from all texts so far
--spec-ngram-size-n --spec-ngram-size-m --spec-ngram-min-hits N | note serve | n-grams of drafts
    have the lengths that were found best
--spec-draft-model --spec-draft-hf -hfd -hfrd --hf-repo-draft N | rename writers | -md
--spec-draft-n-max N | rename writers | --draft-max
--spec-draft-n-min --draft-min --draft-n-min --spec-draft-p-min --draft-p-min N | note | a draft
    ends where another token would cost more than it saves
--spec-default | same writers
--spec-draft-threads -td --threads-draft --spec-draft-threads-batch -tbd --threads-batch-draft
    --spec-draft-cpu-mask -Cd --cpu-mask-draft --spec-draft-cpu-range -Crd --cpu-range-draft
    --spec-draft-cpu-strict --cpu-strict-draft --spec-draft-prio --prio-draft --spec-draft-poll
    --poll-draft --spec-draft-cpu-mask-batch -Cbd --cpu-mask-batch-draft
    --spec-draft-cpu-strict-batch --cpu-strict-batch-draft --spec-draft-prio-batch
    --prio-batch-draft --spec-draft-poll-batch --poll-batch-draft --spec-draft-type-k -ctkd
    --cache-type-k-draft --spec-draft-type-v -ctvd --cache-type-v-draft
    --spec-draft-override-tensor -otd --override-tensor-draft --spec-draft-n-cpu-moe
    --spec-draft-ncmoe -ncmoed --n-cpu-moe-draft --spec-draft-device -devd --device-draft
    --spec-draft-ngl -ngld --gpu-layers-draft --n-gpu-layers-draft N | note | $DRAFT
--spec-draft-cpu-moe -cmoed --cpu-moe-draft | note | $DRAFT
--spec-synth-len --spec-synth-rates --spec-draft-p-split --draft-p-split --spec-ngram-mod-n-min
    --spec-ngram-mod-n-max --spec-ngram-mod-n-match --spec-ngram-simple-size-n
    --spec-ngram-simple-size-m --spec-ngram-simple-min-hits --spec-ngram-map-k-size-n
    --spec-ngram-map-k-size-m --spec-ngram-map-k-min-hits --spec-ngram-map-k4v-size-n
    --spec-ngram-map-k4v-size-m --spec-ngram-map-k4v-min-hits N | note | n-grams of drafts have the
    lengths that were found best
# ---- texts
--predict N | rename writers | --n-predict
-cnv --conversation -i --interactive -if --interactive-first | same talks
-cnv --conversation -i --interactive -if --interactive-first | refuse generate | a conversation is
    a command of its own: hotsplit chat MODEL
-no-cnv --no-conversation | same generate run
-no-cnv --no-conversation | refuse chat | to continue a text: hotsplit generate MODEL -p TEXT
-st --single-turn | refuse | for one answer: hotsplit generate MODEL --chat -p TEXT
-bf --binary-file N | refuse | texts are UTF-8: -f FILE
-o --output --output-file N | refuse texts | the text goes to stdout: end the command with > FILE
--prompt-cache-all --prompt-cache-ro | refuse | --prompt-cache keeps only the prompt, never the
    text after it; leave it out
--display-prompt | same
--no-context-shift --no-escape --no-warmup | same
--context-shift | refuse serve | an answer ends where its context is full; give a longer -c
--keep N | note serve | texts are never shortened here
--keep N | note | --context-shift keeps the first 4 tokens of a text
-np --parallel N | note texts | several texts: hotsplit generate --prompts FILE | 1 -1
-e --escape | refuse | write the characters themselves: -p $'a\\nb' or -f FILE
-mli --multiline-input | refuse | Alt-Enter, or a backslash before Enter, makes a new line
-sp --special | note | special tokens are not printed
--in-prefix --in-suffix N | refuse | the chat template writes what is around a message:
    --chat-template FILE
--in-prefix-bos | refuse | the chat template writes what is around a message: --chat-template FILE
--chat-template-file N | rename writers | --chat-template
--jinja | same
--no-jinja | note | chat templates are always Jinja's
--tfs --tfs-z N | refuse | there is no tail-free sampling (llama.cpp has dropped it, too); --min-p
    cuts the tail
-jf --json-schema-file N | text texts | --json-schema
--grammar-file N | text texts | --grammar
--sampling-seq --sampler-seq N | refuse writers | samplers have names: --samplers
    "top_k;temperature"
--penalize-nl | refuse | the newline is penalised like any token; leave the option out
# ---- thoughts
-rea --reasoning --reasoning-effort --reasoning-budget N | thinking writers | thoughts are not
    counted: 0 turns them off where the template can, and -n bounds the whole answer | auto default
    -1
--reasoning-budget-message N | note | thoughts are not counted
--reasoning-format N | refuse serve | a request says it: "reasoning_format": "none" | auto deepseek
    deepseek-legacy
--reasoning-format N | note | thoughts are separate from the answer | auto deepseek deepseek-legacy
--reasoning-preserve --no-reasoning-preserve | note | the chat template decides which earlier
    thoughts it repeats
--no-skip-chat-parsing | same
--skip-chat-parsing | refuse serve | /v1/completions answers with the plain text
--skip-chat-parsing | note | thoughts are separate from the answer
# ---- the server
-r --reverse-prompt N | refuse serve | $FIELD: "stop"
--ignore-eos | refuse serve | $FIELD: "ignore_eos"
--grammar --grammar-file N | refuse serve | $FIELD: "grammar"
-j --json-schema -jf --json-schema-file N | refuse serve | $FIELD: "json_schema"
-cb --cont-batching --metrics --cache-prompt --prefill-assistant --ui --webui -no-ag --no-agent
    --no-ui-mcp-proxy --no-webui-mcp-proxy --no-slots | same serve
-nocb --no-cont-batching | refuse serve | -np 1 answers one request at a time
--no-cache-prompt | refuse serve | $FIELD: "cache_prompt": false; --kept 0 keeps no text
--no-prefill-assistant | refuse serve | $FIELD: "continue_final_message": false
--cors-origins N | each serve | --cors
--cors-methods --cors-headers N | note serve | pages may send what the API takes
--cors-credentials --no-cors-credentials | note serve | a key is sent in a header
--no-ui --no-webui | note serve | the page at / stays, and --api-key protects it
--ui-config --webui-config --ui-config-file --webui-config-file N | note serve | the page at /
    keeps its own settings
--ui-mcp-proxy --webui-mcp-proxy -ag --agent | refuse serve | $NO_TOOLS
--tools --tools-runtime --mcp-servers-config --mcp-servers-json --media-path N | refuse serve |
    $NO_TOOLS
--path N | refuse serve | the page at / is the program's; serve your own beside it, with --cors
    ORIGIN
--api-prefix N | refuse serve | put a proxy in front of the server that takes the prefix away
--api-key-file N | refuse serve | put the key into the variable HOTSPLIT_API_KEY
--ssl-key-file --ssl-cert-file N | refuse serve | put a proxy in front of the server for TLS
    (docs/serve.md)
--embedding --embeddings | note serve | /v1/embeddings is always there
--pooling N | refuse serve | vectors are pooled as the model's file says
--embd-normalize N | refuse serve | vectors have length 1 | 2
--rerank --reranking | refuse serve | this server only generates and embeds texts
--spm-infill | refuse serve | there is no /infill; /v1/completions takes the whole prompt
--cache-reuse N | note serve | prompts reuse what they begin with alike | 0
-sps --slot-prompt-similarity N | note serve | prompts reuse what they begin with alike
--slots | note serve | /metrics counts what runs and waits
--slot-save-path N | refuse serve | texts are kept in memory (--kept); hotsplit generate
    --prompt-cache keeps a prompt in a file
--props | note serve | /props shows the defaults, which do not change
--models-dir --models-preset --models-max N | refuse serve | $ONE_MODEL
--models-autoload | refuse serve | $ONE_MODEL
--no-models-autoload | same serve
--tags N | note serve | models have no tags
--reuse-port | note serve | a port has one server
--sse-ping-interval N | note serve | streams have no pings
--threads-http N | note serve | requests are read by a few threads of their own
--sleep-idle-seconds N | note serve | the model stays loaded | -1
"""


def _rows() -> tuple[tuple[str, Flag], ...]:
    rows = []
    for row in _ROWS.replace("\n    ", " ").strip().splitlines():
        if row.startswith("#"):
            continue
        names, does, text, usual, whose = (*row.split(" | "), "", "", "")[:5]
        own, mark, value = names.rpartition(" ")
        values: Values = "none"
        if value in ("N", "[N]"):
            names, values = own, "one" if value == "N" else "optional"
        for name, words in _TEXT.items():
            text = text.replace(name, words)
        verb, *commands = does.split()
        groups = [_COMMANDS.get(group, (group,)) for group in commands] or [_LOADERS]
        flag = Flag(
            does=verb,
            values=values,
            commands=sum(groups, ()),
            text=text,
            usual=tuple("" if word == "-" else word for word in usual.split()),
            whose=whose or "llama.cpp's",
        )
        rows.append((names, flag))
    return tuple(rows)


TABLE = _rows()


def flag_of(name: str, command: str) -> Flag | None:
    """The meaning of llama.cpp's option in a command; None if it has none."""
    for names, flag in TABLE:
        if name in names.split() and command in flag.commands:
            return flag
    return None
