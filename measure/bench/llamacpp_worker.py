"""llama.cpp's half of a comparison, run by a Python that has llama-cpp-python.

It imports nothing from hotsplit; its source is passed with -c. Its argument is a JSON object:
model, context, type_k and type_v (ggml's numbers), threads, gpu_layers (null: all). The first line
on stdout describes
llama.cpp and the model, or is {"error": ...}; then each line on stdin gets one on stdout:
    {"do": "depth", "ids": [...]}     fills the cache with these tokens: {}
    {"do": "pp", "ids": [...]}        times a prompt after them, BATCH at a time: {"ns": ...}
    {"do": "tg", "ids": [...]}        times the tokens one by one: {"ns": ...}
Times include the logits of the last token of each call; tests leave the cache unchanged."""

import ctypes
import json
import sys
import time

try:
    import llama_cpp as llama  # type: ignore[import-not-found]
except ImportError as error:
    print(json.dumps({"error": f"it has no llama_cpp ({error})"}), flush=True)  # noqa: T201
    raise SystemExit(0) from None

BATCH, UBATCH = 2048, 512  # llama-bench's
AUTO = -1  # LLAMA_FLASH_ATTN_TYPE_AUTO
ERROR = 4  # GGML_LOG_LEVEL_ERROR
errors: list[str] = []


@llama.llama_log_callback
def listen(level: int, text: bytes, user_data: int) -> None:
    if level == ERROR:
        errors.append(text.decode(errors="replace").strip())


def main(options: dict) -> None:  # type: ignore[type-arg]
    llama.llama_log_set(listen, ctypes.c_void_p(0))
    params = llama.llama_model_default_params()
    if options["gpu_layers"] is not None:
        params.n_gpu_layers = options["gpu_layers"]
    model = llama.llama_model_load_from_file(options["model"].encode(), params)
    if not model:
        return tell({"error": "it cannot load the model", "log": errors})
    context = context_of(model, options)
    if not context:
        return tell({"error": "it cannot make a context", "log": errors})
    tell(about(model))
    depth = 0
    for line in sys.stdin:
        asked = json.loads(line)
        if asked["do"] == "depth":
            depth = len(asked["ids"])
            llama.llama_memory_clear(llama.llama_get_memory(context), False)
            forward(context, asked["ids"])
            tell({})
        else:
            tell({"ns": timed(context, asked["do"], asked["ids"], depth)})
    return None


def tell(answer: dict) -> None:  # type: ignore[type-arg]
    print(json.dumps(answer), flush=True)  # noqa: T201


def context_of(model, options):  # type: ignore[no-untyped-def]
    params = llama.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = options["context"], BATCH, UBATCH
    params.type_k, params.type_v = options["type_k"], options["type_v"]
    params.n_threads = params.n_threads_batch = options["threads"]
    params.flash_attn_type = AUTO
    return llama.llama_init_from_model(model, params)


def about(model) -> dict:  # type: ignore[no-untyped-def,type-arg]
    name = ctypes.create_string_buffer(256)
    llama.llama_model_desc(model, name, len(name))
    return {
        "tool": f"llama-cpp-python {llama.__version__}",
        "system": llama.llama_print_system_info().decode().strip(),
        "model_type": name.value.decode(errors="replace"),
        "model_size": llama.llama_model_size(model),
        "model_n_params": llama.llama_model_n_params(model),
        "vocab_size": llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model)),
    }


def timed(context, kind: str, ids: list[int], depth: int) -> int:  # type: ignore[no-untyped-def]
    began = time.perf_counter_ns()
    for piece in [ids] if kind == "pp" else [[token] for token in ids]:
        forward(context, piece)
    ns = time.perf_counter_ns() - began
    llama.llama_memory_seq_rm(llama.llama_get_memory(context), 0, depth, -1)
    return ns


def forward(context, ids: list[int]) -> None:  # type: ignore[no-untyped-def]
    for start in range(0, len(ids), BATCH):
        piece = ids[start : start + BATCH]
        tokens = (llama.llama_token * len(piece))(*piece)
        status = llama.llama_decode(context, llama.llama_batch_get_one(tokens, len(piece)))
        assert status == 0, (status, errors)
    if ids:
        llama.llama_get_logits_ith(context, -1)[0]


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
