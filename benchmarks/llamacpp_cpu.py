"""Measures llama.cpp's decode and prefill speed; run by the Python of a venv with llama-cpp-python.

Its arguments are a model file, a context length and a number of sequences. It first prints a line
with llama.cpp's system info. Then each line on stdin is a JSON object, which it answers with a list
of seconds:
    {"do": "decode", "threads": n, "flash": bool, "ids": [...]}
        one per token, after a prompt of PROMPT tokens
    {"do": "prefill", "threads": n, "flash": bool, "ids": [...], "repeats": r}
        one per repeat, with `ids` in one batch
    {"do": "batch", "threads": n, "flash": bool, "ids": [...], "sequences": b}
        one per token: each of `ids` in that many sequences at once, after prompts of PROMPT tokens
Each time includes the logits of the last token; `flash` says whether flash attention is on."""

import ctypes
import json
import sys
import time
from functools import lru_cache

import llama_cpp as llama

PROMPT = 16


@llama.llama_log_callback
def silent(level: int, text: bytes, user_data: int) -> None:
    pass


def main(path: str, context_length: int, num_sequences: int) -> None:
    llama.llama_log_set(silent, ctypes.c_void_p(0))
    model = llama.llama_model_load_from_file(path.encode(), llama.llama_model_default_params())

    @lru_cache
    def with_flash(flash: bool):  # type: ignore[no-untyped-def]
        return context_of(model, context_length, num_sequences, flash)

    print(json.dumps(llama.llama_print_system_info().decode()), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        context, ids = with_flash(asked["flash"]), asked["ids"]
        llama.llama_set_n_threads(context, asked["threads"], asked["threads"])
        if asked["do"] == "decode":
            from_empty(context, [7] * PROMPT)
            seconds = [forward(context, [token]) for token in ids]
        elif asked["do"] == "batch":
            seconds = batch(context, ids, asked["sequences"])
        else:
            seconds = [from_empty(context, ids) for _ in range(asked["repeats"])]
        print(json.dumps(seconds), flush=True)


def context_of(model, context_length: int, num_sequences: int, flash: bool):  # type: ignore[no-untyped-def]
    params = llama.llama_context_default_params()
    params.n_batch = params.n_ubatch = min(2048, context_length)
    params.n_ctx, params.n_seq_max = context_length * num_sequences, num_sequences
    params.flash_attn_type = int(flash)  # LLAMA_FLASH_ATTN_TYPE_DISABLED, _ENABLED
    return llama.llama_init_from_model(model, params)


def from_empty(context, ids: list[int]) -> float:  # type: ignore[no-untyped-def]
    llama.llama_memory_clear(llama.llama_get_memory(context), False)
    return forward(context, ids)


def forward(context, ids: list[int]) -> float:  # type: ignore[no-untyped-def]
    tokens = (llama.llama_token * len(ids))(*ids)
    began = time.perf_counter()
    status = llama.llama_decode(context, llama.llama_batch_get_one(tokens, len(ids)))
    assert status == 0, status
    llama.llama_get_logits_ith(context, -1)[0]
    return time.perf_counter() - began


def batch(context, ids: list[int], num_sequences: int) -> list[float]:  # type: ignore[no-untyped-def]
    llama.llama_memory_clear(llama.llama_get_memory(context), False)
    rows = llama.llama_batch_init(num_sequences, 0, 1)
    seconds = []
    for position, token in enumerate([7] * PROMPT + ids):
        rows.n_tokens = num_sequences
        for n in range(num_sequences):
            rows.token[n], rows.pos[n], rows.logits[n] = token, position, True
            rows.n_seq_id[n], rows.seq_id[n][0] = 1, n
        began = time.perf_counter()
        status = llama.llama_decode(context, rows)
        assert status == 0, status
        llama.llama_get_logits_ith(context, -1)[0]
        seconds.append(time.perf_counter() - began)
    llama.llama_batch_free(rows)
    return seconds[PROMPT:]


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
