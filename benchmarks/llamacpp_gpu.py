"""Runs llama.cpp with some of its layers on a GPU, in a Python that can import what `gpu_rival.sh`
built.

It is started with a model file, a context length and a number of layers; the first line on stdout
has llama.cpp's system info and the buffers that it reports, or the error. After that it works like
gpu_worker.py: a JSON object per line in and out, to prefill or to decode."""

import ctypes
import json
import sys
import time

import llama_cpp as llama

lines: list[str] = []


@llama.llama_log_callback
def listen(level: int, text: bytes, user_data: int) -> None:
    lines.append(text.decode(errors="replace"))


def main(path: str, context_length: int, num_layers: int) -> None:
    llama.llama_log_set(listen, ctypes.c_void_p(0))
    params = llama.llama_model_default_params()
    params.n_gpu_layers = num_layers
    model = llama.llama_model_load_from_file(path.encode(), params)
    options = llama.llama_context_default_params()
    options.n_ctx = context_length
    context = llama.llama_init_from_model(model, options) if model else None
    if not context:
        print(json.dumps({"error": "".join(lines[-2:]).strip()}), flush=True)
        return
    about = llama.llama_print_system_info().decode()
    buffers = [line for line in "".join(lines).splitlines() if "buffer size" in line]
    print(json.dumps({"about": about, "buffers": buffers}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        llama.llama_set_n_threads(context, asked["threads"], asked["threads"])
        seconds = prefill(context, asked["ids"]) if asked["do"] == "prefill" else decode(
            context, asked["ids"], asked["start"]
        )  # fmt: skip
        print(json.dumps({"seconds": seconds}), flush=True)


def prefill(context, ids: list[int]) -> float:  # type: ignore[no-untyped-def]
    llama.llama_memory_seq_rm(llama.llama_get_memory(context), 0, 0, -1)
    began = time.perf_counter()
    run(context, ids)
    return time.perf_counter() - began


def decode(context, ids: list[int], start: int) -> float:  # type: ignore[no-untyped-def]
    """Decodes the ids one by one, after the positions before `start`."""
    llama.llama_memory_seq_rm(llama.llama_get_memory(context), 0, start, -1)
    began = time.perf_counter()
    for token in ids:
        run(context, [token])
    return time.perf_counter() - began


def run(context, ids: list[int]) -> None:  # type: ignore[no-untyped-def]
    tokens = (llama.llama_token * len(ids))(*ids)
    status = llama.llama_decode(context, llama.llama_batch_get_one(tokens, len(ids)))
    assert status == 0, status
    llama.llama_get_logits_ith(context, -1)[0]  # synchronises


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
