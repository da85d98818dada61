"""Measures llama.cpp's decode and prefill speed; run by the Python of a venv with llama-cpp-python.

Its arguments are a model file, a context length, a number of sequences and the type of keys and
values. It first prints a line with llama.cpp's system info. Then each line on stdin is a JSON
object, which it answers with a list of seconds:
    {"do": "decode", "threads": n, "flash": bool, "ids": [...]}
        one per token, after a prompt of PROMPT tokens
    {"do": "prefill", "threads": n, "flash": bool, "ids": [...], "repeats": r}
        one per repeat, with `ids` in one batch
    {"do": "batch", "threads": n, "flash": bool, "ids": [...], "sequences": b}
        one per token: each of `ids` in that many sequences at once, after prompts of PROMPT tokens
    {"do": "deep", "threads": n, "flash": bool, "ids": [...], "depth": d}
        one per token, after d tokens, which are computed only if they are not yet in the cache
    {"do": "grown", "threads": n, "flash": true, "ids": [...], "depth": d}
        likewise, but the keys and values are those of GROWN tokens, repeated
Each time includes the logits of the last token; `flash` says whether flash attention is on."""

import ctypes
import json
import struct
import sys
import time
from functools import lru_cache

import llama_cpp as llama

PROMPT = 16
PIECE = 512  # tokens per batch, for longer texts
GROWN = 256
TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 8, "bf16": 30}  # ggml.h


@llama.llama_log_callback
def silent(level: int, text: bytes, user_data: int) -> None:
    pass


def main(path: str, context_length: int, num_sequences: int, cache: str) -> None:
    llama.llama_log_set(silent, ctypes.c_void_p(0))
    model = llama.llama_model_load_from_file(path.encode(), llama.llama_model_default_params())

    @lru_cache
    def with_flash(flash: bool):  # type: ignore[no-untyped-def]
        return context_of(model, context_length, num_sequences, flash, cache)

    depths = {False: 0, True: 0}
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
        elif asked["do"] == "deep":
            seconds = deep(context, ids, depths[asked["flash"]], asked["depth"])
            depths[asked["flash"]] = asked["depth"]
        elif asked["do"] == "grown":
            seconds = grown(context, ids, asked["depth"])
        else:
            seconds = [from_empty(context, ids) for _ in range(asked["repeats"])]
        print(json.dumps(seconds), flush=True)


def context_of(  # type: ignore[no-untyped-def]
    model, context_length: int, num_sequences: int, flash: bool, cache: str
):
    params = llama.llama_context_default_params()
    params.n_batch = params.n_ubatch = min(2048, context_length)
    params.type_k = params.type_v = TYPES[cache]
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


def deep(context, ids: list[int], known: int, depth: int) -> list[float]:  # type: ignore[no-untyped-def]
    memory = llama.llama_get_memory(context)
    if known > depth:
        llama.llama_memory_clear(memory, False)
        known = 0
    filler = [3 + 7 * position % 40_000 for position in range(known, depth)]
    for start in range(0, len(filler), PIECE):
        forward(context, filler[start : start + PIECE])
    seconds = [forward(context, [token]) for token in ids]
    llama.llama_memory_seq_rm(memory, 0, depth, -1)
    return seconds


def grown(context, ids: list[int], depth: int) -> list[float]:  # type: ignore[no-untyped-def]
    from_empty(context, [3 + 7 * position for position in range(GROWN)])
    size = llama.llama_state_seq_get_size(context, 0)
    state = (ctypes.c_uint8 * size)()
    assert llama.llama_state_seq_get_data(context, state, size, 0) == size
    longer = bytearray(repeated(bytes(state), depth))
    del state
    memory = llama.llama_get_memory(context)
    llama.llama_memory_clear(memory, False)
    data = (ctypes.c_uint8 * len(longer)).from_buffer(longer)
    assert llama.llama_state_seq_set_data(context, data, len(longer), 0) == len(longer)
    del data, longer
    assert llama.llama_memory_seq_pos_max(memory, 0) == depth - 1
    return [forward(context, [token]) for token in ids]


def repeated(state: bytes, depth: int) -> bytes:
    """The state of a sequence of GROWN tokens (llama_kv_cache::state_write of llama.cpp's
    llama-kv-cache.cpp, flash attention, one stream) as one of `depth` tokens."""
    at, out = 0, bytearray()

    def take(form: str) -> tuple[int, ...]:
        nonlocal at
        found = struct.unpack_from(f"<{form}", state, at)
        at += struct.calcsize(f"<{form}")
        return found

    magic, sequence, streams, cells = take("IIII")
    assert (sequence, streams, cells) == (0, 1, GROWN), (sequence, streams, cells)
    out += struct.pack("<IIII", magic, sequence, streams, depth)
    for position in range(GROWN):
        assert take("iII") == (position, 1, 0), "a position of one sequence"
    for position in range(depth):
        out += struct.pack("<iII", position, 1, 0)
    transposed, layers = take("II")
    assert not transposed
    out += struct.pack("<II", transposed, layers)
    for _ in range(2 * layers):
        kind, row = take("iQ")
        rows = state[at : at + GROWN * row]
        at += GROWN * row
        out += struct.pack("<iQ", kind, row) + rows * (depth // GROWN)
    assert at == len(state) and depth % GROWN == 0
    return bytes(out)


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
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
