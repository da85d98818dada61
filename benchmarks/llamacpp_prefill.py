"""llama.cpp's prefill speed; run by the Python of a venv that has llama-cpp-python.

Started with a model file and the number of tokens of a prompt; each line on stdin is a JSON object
{"threads": n, "flash": bool, "ids": [...]}, each line on stdout the seconds that the prompt took in
one batch, the logits of its last token included.
What this program does not know: sparkinfer."""

import ctypes
import json
import sys
import time

import llama_cpp as llama


@llama.llama_log_callback
def silent(level: int, text: bytes, user_data: int) -> None:
    pass


def main(path: str, num_tokens: int) -> None:
    llama.llama_log_set(silent, ctypes.c_void_p(0))
    model = llama.llama_model_load_from_file(path.encode(), llama.llama_model_default_params())
    contexts = {flash: context_of(model, num_tokens, flash) for flash in (False, True)}
    print(json.dumps(llama.llama_print_system_info().decode()), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        context = contexts[asked["flash"]]
        llama.llama_set_n_threads(context, asked["threads"], asked["threads"])
        llama.llama_memory_clear(llama.llama_get_memory(context), False)
        tokens = (llama.llama_token * num_tokens)(*asked["ids"])
        began = time.perf_counter()
        status = llama.llama_decode(context, llama.llama_batch_get_one(tokens, num_tokens))
        assert status == 0, status
        llama.llama_get_logits_ith(context, -1)[0]
        print(time.perf_counter() - began, flush=True)


def context_of(model, num_tokens: int, flash: bool):  # type: ignore[no-untyped-def]
    params = llama.llama_context_default_params()
    params.n_ctx = 2 * num_tokens
    params.n_batch = params.n_ubatch = num_tokens
    params.flash_attn_type = int(flash)  # LLAMA_FLASH_ATTN_TYPE_DISABLED, _ENABLED
    return llama.llama_init_from_model(model, params)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
