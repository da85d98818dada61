"""llama.cpp's decode speed; run by the Python of a venv that has llama-cpp-python.

Started with a model file; each line on stdin is a JSON object {"threads": n, "ids": [...]}, each
line on stdout the seconds that decoding `ids` one by one took, after a prompt of PROMPT tokens.
What this program does not know: sparkinfer."""

import ctypes
import json
import sys
import time

import llama_cpp as llama

PROMPT = 16


@llama.llama_log_callback
def silent(level: int, text: bytes, user_data: int) -> None:
    pass


def main(path: str, context_length: int) -> None:
    llama.llama_log_set(silent, ctypes.c_void_p(0))
    model = llama.llama_model_load_from_file(path.encode(), llama.llama_model_default_params())
    params = llama.llama_context_default_params()
    params.n_ctx = context_length
    context = llama.llama_init_from_model(model, params)
    decode(context, [7] * PROMPT)
    print(json.dumps(llama.llama_print_system_info().decode()), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        llama.llama_set_n_threads(context, asked["threads"], asked["threads"])
        llama.llama_memory_seq_rm(llama.llama_get_memory(context), 0, PROMPT, -1)
        began = time.perf_counter()
        for token in asked["ids"]:
            decode(context, [token])
        print(time.perf_counter() - began, flush=True)


def decode(context, ids: list[int]) -> None:  # type: ignore[no-untyped-def]
    tokens = (llama.llama_token * len(ids))(*ids)
    status = llama.llama_decode(context, llama.llama_batch_get_one(tokens, len(ids)))
    assert status == 0, status
    llama.llama_get_logits_ith(context, -1)[0]


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
