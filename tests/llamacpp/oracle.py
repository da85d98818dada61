"""Asks llama.cpp one question; run by the Python of build/llamacpp-venv.

Reads a JSON object from stdin ({"do": ..., ...}) and prints the answer as one. Logits go to a .npy
file."""

import ctypes
import json
import sys

import llama_cpp as llama
import numpy as np

LOG: list[str] = []


@llama.llama_log_callback
def keep(level: int, text: bytes, user_data: int) -> None:
    LOG.append(text.decode(errors="replace"))


def load(path: str, vocab_only: bool = False):  # type: ignore[no-untyped-def]
    params = llama.llama_model_default_params()
    params.vocab_only = vocab_only
    return llama.llama_model_load_from_file(path.encode(), params)


def about() -> dict:
    return {"version": llama.__version__, "system": llama.llama_print_system_info().decode()}


def why_not(model: str) -> dict:
    """Whether llama.cpp loads the model, and its log."""
    loaded = load(model) is not None
    return {"loaded": loaded, "log": "".join(LOG)}


def tokenize(model: str, lines: list[str], add_special: bool, parse_special: bool) -> dict:
    vocab = llama.llama_model_get_vocab(load(model, vocab_only=True))
    return {"ids": [encode(vocab, line, add_special, parse_special) for line in lines]}


def ends(model: str) -> dict:
    """The ids of the tokens that end a text."""
    vocab = llama.llama_model_get_vocab(load(model, vocab_only=True))
    ids = range(llama.llama_vocab_n_tokens(vocab))
    return {"ids": [token_id for token_id in ids if llama.llama_vocab_is_eog(vocab, token_id)]}


def encode(vocab, line: str, add_special: bool, parse_special: bool) -> list[int]:  # type: ignore[no-untyped-def]
    text = line.encode()
    room = 2 * len(text) + 8
    ids = (llama.llama_token * room)()
    count = llama.llama_tokenize(vocab, text, len(text), ids, room, add_special, parse_special)
    assert count >= 0, (line, count)
    return list(ids[:count])


def greedy(model: str, prompt: list[int], count: int, kv_kind: str, logits: str) -> dict:
    """`count` tokens, each the most probable, and the logits [count, V] that each was taken
    from."""
    decode = decoder(model, len(prompt) + count, kv_kind)
    ids, rows, batch = [], [], prompt
    for _ in range(count):
        (row_V,) = decode(batch, 1)
        rows.append(row_V)
        ids.append(int(row_V.argmax()))
        batch = ids[-1:]
    np.save(logits, np.stack(rows))
    return {"ids": ids}


def follow(model: str, ids: list[int], count: int, kv_kind: str, logits: str) -> dict:
    """The logits [count, V] after the last `count` tokens of a text, computed in one batch."""
    np.save(logits, np.stack(decoder(model, len(ids), kv_kind)(ids, count)))
    return {}


def decoder(model: str, length: int, kv_kind: str):  # type: ignore[no-untyped-def]
    """A function of further tokens and a number of rows that gives the logits of the last ones."""
    params = llama.llama_context_default_params()
    params.n_ctx = length
    params.n_threads = params.n_threads_batch = 1
    params.type_k = params.type_v = {"f32": llama.GGML_TYPE_F32, "f16": llama.GGML_TYPE_F16}[
        kv_kind
    ]
    params.flash_attn_type = 0  # off: it would compute f32 caches in f16
    loaded = load(model)
    context = llama.llama_init_from_model(loaded, params)
    size = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(loaded))
    position = 0

    def decode(ids: list[int], count: int) -> list[np.ndarray]:
        nonlocal position
        batch = llama.llama_batch_init(len(ids), 0, 1)
        batch.n_tokens = len(ids)
        for t, token in enumerate(ids):
            batch.token[t], batch.pos[t], batch.logits[t] = (
                token,
                position + t,
                t >= len(ids) - count,
            )
            batch.n_seq_id[t], batch.seq_id[t][0] = 1, 0
        status = llama.llama_decode(context, batch)
        assert status == 0, status
        llama.llama_batch_free(batch)
        position += len(ids)
        rows = (llama.llama_get_logits_ith(context, t) for t in range(len(ids) - count, len(ids)))
        return [np.ctypeslib.as_array(row, (size,)).copy() for row in rows]

    return decode


def quantize(source: str, target: str, kind: str, importances: str | None = None) -> dict:
    """Quantises all matrices to one type, like `llama-quantize --pure`; to a mixture (a kind that
    ends in _s, _m, _l, _0 or _1, or has one to three bits), like `llama-quantize` without that
    option. `importances`: an .npz of mean squares by the names of matrices."""
    params = llama.llama_model_quantize_default_params()
    name = {"q4_k": "q4_k_s", "q5_k": "q5_k_s", "q3_k": "q3_k_s"}.get(kind, kind)
    params.ftype = getattr(llama, f"LLAMA_FTYPE_MOSTLY_{name.upper()}")
    is_mixed = kind[-2:] in ("_s", "_m", "_l", "_0", "_1") or kind[:3] in ("iq1", "iq2", "iq3")
    params.pure, params.nthread = not is_mixed, 1
    arrays = dict(np.load(importances)) if importances else {}
    if arrays:
        entries = (llama.llama_model_imatrix_data * (len(arrays) + 1))()  # the last one ends them
        for entry, (name, array) in zip(entries, arrays.items(), strict=False):
            entry.name, entry.size = name.encode(), array.size
            entry.data = ctypes.cast(array.ctypes.data, type(entry.data))
        params.imatrix = ctypes.cast(entries, type(params.imatrix))
    status = llama.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(params))
    assert status == 0, "".join(LOG)[-2000:]
    return {}


ACTIONS = {f.__name__: f for f in (about, why_not, tokenize, ends, greedy, follow, quantize)}

if __name__ == "__main__":
    llama.llama_log_set(keep, ctypes.c_void_p(0))
    llama.llama_backend_init()
    request = json.load(sys.stdin)
    reply = ACTIONS[request.pop("do")](**request)
    print(json.dumps(reply))
