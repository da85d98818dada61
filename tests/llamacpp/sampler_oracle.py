"""Runs llama.cpp's samplers on given logits, in the Python of build/llamacpp-venv.

Reads a JSON object from stdin: `model` (for DRY's vocabulary), `inputs` (an .npz with one array of
logits a case, by its number), `cases`, and `output`. A case has `chain`, a list of [name, arguments
...] with the arguments of llama_sampler_init_NAME (lists without their lengths, and no vocabulary),
and `history`, tokens accepted before. Logits of two dimensions are successive steps of one chain.
The output is an .npz: for case I and step J `I.J.ids` and `I.J.p` after all samplers, and
`I.J.selected`, the id drawn."""

import ctypes
import json
import sys

import llama_cpp as llama
import numpy as np

TOKEN = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])


@llama.llama_log_callback
def silent(level: int, text: bytes, user_data: int) -> None:
    pass


def sampler(vocab, name: str, *arguments):  # type: ignore[no-untyped-def]
    if name == "dry":
        *numbers, breakers = arguments
        texts = (ctypes.c_char_p * len(breakers))(*[text.encode() for text in breakers])
        return llama.llama_sampler_init_dry(vocab, *numbers, texts, len(breakers))
    if name == "logit_bias":
        size, pairs = arguments
        biases = (llama.llama_logit_bias * len(pairs))()
        for bias, (token, value) in zip(biases, pairs, strict=True):
            bias.token, bias.bias = token, value
        return llama.llama_sampler_init_logit_bias(size, len(pairs), biases)
    return getattr(llama, f"llama_sampler_init_{name}")(*arguments)


def steps(vocab, chain: list, history: list[int], logits: np.ndarray):  # type: ignore[no-untyped-def]
    """Yields (ids, p, id drawn) for each row of logits [steps, V]."""
    built = llama.llama_sampler_chain_init(llama.llama_sampler_chain_default_params())
    for name, *arguments in chain:
        llama.llama_sampler_chain_add(built, sampler(vocab, name, *arguments))
    for token in history:
        llama.llama_sampler_accept(built, token)
    for row_V in logits:
        tokens_V = np.zeros(len(row_V), TOKEN)
        tokens_V["id"], tokens_V["logit"] = np.arange(len(row_V)), row_V
        data = tokens_V.ctypes.data_as(ctypes.POINTER(llama.llama_token_data))
        array = llama.llama_token_data_array(data=data, size=len(row_V), selected=-1, sorted=False)
        llama.llama_sampler_apply(built, ctypes.byref(array))
        # XTC advances the pointer `data`.
        address = ctypes.cast(array.data, ctypes.c_void_p).value
        octets = (ctypes.c_char * (TOKEN.itemsize * array.size)).from_address(address)
        left_A = np.frombuffer(octets, TOKEN).copy()
        selected = int(left_A["id"][array.selected])
        yield left_A["id"], left_A["p"], selected
        llama.llama_sampler_accept(built, selected)
    llama.llama_sampler_free(built)


def main() -> None:
    request = json.load(sys.stdin)
    vocab = None
    if request["model"]:
        params = llama.llama_model_default_params()
        params.vocab_only = True
        model = llama.llama_model_load_from_file(request["model"].encode(), params)
        vocab = llama.llama_model_get_vocab(model)
    found = {}
    with np.load(request["inputs"]) as inputs:
        for number, case in enumerate(request["cases"]):
            logits = np.atleast_2d(inputs[str(number)])
            for step, result in enumerate(steps(vocab, case["chain"], case["history"], logits)):
                for name, value in zip(("ids", "p", "selected"), result, strict=True):
                    found[f"{number}.{step}.{name}"] = value
    np.savez(request["output"], **found)
    print("{}")


if __name__ == "__main__":
    llama.llama_log_set(silent, ctypes.c_void_p(0))
    llama.llama_backend_init()
    main()
