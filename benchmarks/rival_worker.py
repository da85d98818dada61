"""Runs llama.cpp with one model, in a Python that has llama_cpp, and times it on request.

Its argument is a JSON object: model, context (tokens of a sequence), sequences, batch (null:
llama.cpp's own), gpu_layers (null: its own number) and, if wanted, cpu_experts: as its --n-cpu-moe,
the number of layers whose experts stay in main memory. The first line on stdout has its system info
and the buffers that it reports, or {"error": ...}. Then each line on stdin is a JSON object with a
number of threads, and "flash": true or false where llama.cpp shall not decide itself whether to use
flash attention; it is answered with {"seconds": [...]}, each including the logits of the last
token:
    {"do": "prefill", "ids": [...], "repeats": r}
        one per repeat, with `ids` in one call on an empty cache
    {"do": "decode", "ids": [...], "start": p}
        one per token, after the first p tokens of the cache
    {"do": "batch", "ids": [[...], ...]}
        one per step: a token of each sequence, after prompts of PROMPT tokens"""

import ctypes
import json
import sys
import time
from functools import lru_cache

import llama_cpp as llama
from llama_cpp._ggml import libggml

PROMPT = 16
AUTO = -1  # LLAMA_FLASH_ATTN_TYPE_AUTO; 0 and 1 are _DISABLED and _ENABLED
lines: list[str] = []


@llama.llama_log_callback
def listen(level: int, text: bytes, user_data: int) -> None:
    lines.append(text.decode(errors="replace"))


def main(options: dict) -> None:  # type: ignore[type-arg]
    llama.llama_log_set(listen, ctypes.c_void_p(0))
    params = llama.llama_model_default_params()
    if options["gpu_layers"] is not None:
        params.n_gpu_layers = options["gpu_layers"]
    overrides = overrides_of(options.get("cpu_experts", 0))
    params.tensor_buft_overrides = ctypes.cast(overrides, ctypes.c_void_p)
    model = llama.llama_model_load_from_file(options["model"].encode(), params)

    @lru_cache
    def with_flash(flash: bool | None):  # type: ignore[no-untyped-def]
        return context_of(model, options, flash)

    # A context on a GPU is made at once, for its buffers to be reported.
    if not model or (options["gpu_layers"] is not None and not with_flash(None)):
        print(json.dumps({"error": "".join(lines[-2:]).strip()}), flush=True)
        return
    about = llama.llama_print_system_info().decode()
    buffers = [line for line in "".join(lines).splitlines() if "buffer size" in line]
    print(json.dumps({"about": about, "buffers": buffers}), flush=True)
    does = {"prefill": prefill, "decode": decode, "batch": batch}
    for line in sys.stdin:
        asked = json.loads(line)
        context, threads = with_flash(asked.pop("flash", None)), asked.pop("threads")
        llama.llama_set_n_threads(context, threads, threads)
        print(json.dumps({"seconds": does[asked.pop("do")](context, **asked)}), flush=True)


class Override(ctypes.Structure):
    """llama_model_tensor_buft_override (llama.h)"""

    _fields_ = [("pattern", ctypes.c_char_p), ("buffer_type", ctypes.c_void_p)]


def overrides_of(num_layers: int):  # type: ignore[no-untyped-def]
    """The patterns of --n-cpu-moe (common/common.h), ended by an empty one."""
    libggml.ggml_backend_cpu_buffer_type.restype = ctypes.c_void_p
    main_memory = libggml.ggml_backend_cpu_buffer_type()
    found = [
        Override(rf"blk\.{n}\.ffn_(up|down|gate|gate_up)_(ch|)exps".encode(), main_memory)
        for n in range(num_layers)
    ]
    return (Override * (num_layers + 1))(*found)


def context_of(model, options: dict, flash: bool | None):  # type: ignore[no-untyped-def,type-arg]
    params, num_sequences = llama.llama_context_default_params(), options["sequences"]
    if options["batch"] is not None:
        params.n_batch = params.n_ubatch = options["batch"]
    params.n_ctx, params.n_seq_max = options["context"] * num_sequences, num_sequences
    params.flash_attn_type = AUTO if flash is None else int(flash)
    return llama.llama_init_from_model(model, params)


def prefill(context, ids: list[int], repeats: int = 1) -> list[float]:  # type: ignore[no-untyped-def]
    seconds = []
    for _ in range(repeats):
        llama.llama_memory_clear(llama.llama_get_memory(context), False)
        seconds.append(forward(context, ids))
    return seconds


def decode(context, ids: list[int], start: int) -> list[float]:  # type: ignore[no-untyped-def]
    llama.llama_memory_seq_rm(llama.llama_get_memory(context), 0, start, -1)
    return [forward(context, [token]) for token in ids]


def forward(context, ids: list[int]) -> float:  # type: ignore[no-untyped-def]
    tokens = (llama.llama_token * len(ids))(*ids)
    return run(context, llama.llama_batch_get_one(tokens, len(ids)))


def run(context, rows) -> float:  # type: ignore[no-untyped-def]
    began = time.perf_counter()
    status = llama.llama_decode(context, rows)
    assert status == 0, status
    llama.llama_get_logits_ith(context, -1)[0]  # synchronises
    return time.perf_counter() - began


def batch(context, ids: list[list[int]]) -> list[float]:  # type: ignore[no-untyped-def]
    llama.llama_memory_clear(llama.llama_get_memory(context), False)
    sequences = len(ids[0])
    rows = llama.llama_batch_init(sequences, 0, 1)
    seconds = []
    for position, tokens in enumerate([[7] * sequences] * PROMPT + ids):
        rows.n_tokens = sequences
        for n, token in enumerate(tokens):
            rows.token[n], rows.pos[n], rows.logits[n] = token, position, True
            rows.n_seq_id[n], rows.seq_id[n][0] = 1, n
        seconds.append(run(context, rows))
    llama.llama_batch_free(rows)
    return seconds[PROMPT:]


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
