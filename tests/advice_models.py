"""Two models for which it is known whether a rule pays, and the text that they predict.

Both predict a chain over 64 letters: three times out of four the next letter is the successor of
the last, otherwise a random one. A letter is a code of signs (128, or 64 in the second model). Each
working neuron of the feed-forward layer reads one sign of it, with a gate that is always open, and
together they turn the letter's code into its successor's. Silencing one costs quality, unless it
reads a sign that all letters share, as a few do.

    every_neuron_works   all neurons work: no rule pays, and 8 bits are as good as 16
    most_neurons_idle    of ten neurons seven have gates that are always nearly shut: silencing them
                         costs next to nothing. Each block of 32 weights of gate and up has one
                         that is huge and meets an input that is always 0, so that rounding to 8
                         bits or 4 turns the other weights of working neurons to 0: no smaller type
                         can be used.

Letters: D model width, F neurons, N letters, V vocabulary."""

import dataclasses
import string
from pathlib import Path

import numpy as np
from models import byte_level_keys, make_model, make_sizes
from tokenizers import pre_tokenizers

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.files.gguf_file import array_entry

ALPHABET = string.ascii_letters + string.digits + "+-"
NUM_LETTERS = len(ALPHABET)
WIDTH, BLOCK = 128, 32
# Inputs with signs; the first is the same for all letters.
HALF = np.concatenate([np.arange(16) + start for start in range(0, WIDTH, BLOCK)])
EVERY = np.arange(WIDTH)
ALWAYS = 0  # an input that is always 1
NEVER = np.arange(BLOCK - 1, WIDTH, BLOCK)  # inputs that are always 0
OPEN, SHUT, HUGE = 3.0, -8.0, 1000.0
SURE = 0.75  # probability of the successor
MARGIN = float(np.log(SURE / (1 - SURE) * 255))  # of its logit over the others


def every_neuron_works(path: Path, num_neurons: int = 2048) -> ModelFile:
    return _model(path, num_neurons, np.ones(num_neurons, bool), has_huge=False)


def most_neurons_idle(path: Path, num_neurons: int = 1024) -> ModelFile:
    return _model(path, num_neurons, np.arange(num_neurons) % 10 < 3, has_huge=True)


def chain(num_letters: int, seed: int = 0) -> str:
    """A random text of this many letters."""
    random = np.random.default_rng(seed)
    keeps, letter, found = random.random(num_letters) < SURE, 0, []
    for keep, other in zip(keeps, random.integers(0, NUM_LETTERS, num_letters), strict=True):
        letter = (letter + 1) % NUM_LETTERS if keep else int(other)
        found.append(ALPHABET[letter])
    return "".join(found)


def _model(path: Path, num_neurons: int, works_F: np.ndarray, *, has_huge: bool) -> ModelFile:
    keys, vocab_size = byte_level_keys()
    shape = make_sizes(
        num_layers=1, width=WIDTH, num_neurons=num_neurons, num_heads=1, num_kv_heads=1,
        head_width=32, vocab_size=vocab_size, context_length=256,
    )  # fmt: skip
    model = make_model(sizes=shape, kind="f16", activation="silu", path=path, extra_keys=keys)
    signs = HALF if has_huge else EVERY
    code_VD = _codes(vocab_size, signs)
    gate_FD, up_FD, down_FD = _feed_forward(code_VD[_letters()], works_F, signs)
    if has_huge:
        gate_FD[:, NEVER] = up_FD[:, NEVER] = HUGE
    # Attention is present, but contributes little.
    output = model.tensors["blk.0.attn_output.weight"]
    output_DH = output.read_rows(0, WIDTH).astype(np.float64) * 0.01
    output_DH[[ALWAYS, *(NEVER if has_huge else ())]] = 0
    size = np.sqrt(WIDTH * len(signs))  # the product of a normalised code with the code
    ones_D = np.ones(WIDTH)
    values = {
        "token_embd.weight": code_VD, "output.weight": code_VD * MARGIN / size,
        "blk.0.attn_output.weight": output_DH, "blk.0.ffn_gate.weight": gate_FD,
        "blk.0.ffn_up.weight": up_FD, "blk.0.ffn_down_t.weight": down_FD,
    }  # fmt: skip
    norms = {name: ones_D for name in model.tensors if name.endswith("norm.weight")}
    tensors = {name: array_entry(value.astype(np.float32), "f16") for name, value in values.items()}
    tensors |= {name: array_entry(value, "f32") for name, value in norms.items()}
    assert tensors.keys() <= model.tensors.keys(), tensors.keys() - model.tensors.keys()
    model = dataclasses.replace(model, tensors=model.tensors | tensors)
    model.save(path)
    return model


def _letters() -> list[int]:
    """The tokens of ALPHABET: single bytes, in the order of their characters."""
    order = sorted(pre_tokenizers.ByteLevel.alphabet())
    return [order.index(letter) for letter in ALPHABET]


def _codes(vocab_size: int, signs: np.ndarray) -> np.ndarray:
    """f64 [V, D]: the letters' codes are orthogonal; other tokens have random ones."""
    code_VD = np.zeros((vocab_size, WIDTH))
    code_VD[:, signs] = np.random.default_rng(0).choice([-1.0, 1.0], (vocab_size, len(signs)))
    code_VD[np.ix_(_letters(), signs)] = _hadamard(len(signs))[:NUM_LETTERS]
    code_VD[:, ALWAYS] = 1
    return code_VD


def _hadamard(size: int) -> np.ndarray:
    """Orthogonal rows of signs, by Sylvester's construction; `size` is a power of two."""
    found = np.ones((1, 1))
    while len(found) < size:
        found = np.kron([[1, 1], [1, -1]], found)
    return found


def _feed_forward(
    code_ND: np.ndarray, works_F: np.ndarray, signs: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """gate, up and down [F, D], with which a letter's code becomes its successor's."""
    num_neurons = len(works_F)
    gate_FD, up_FD = np.zeros((2, num_neurons, WIDTH))
    gate_FD[:, ALWAYS] = np.where(works_F, OPEN, SHUT)
    up_FD[np.arange(num_neurons), signs[np.arange(num_neurons) % len(signs)]] = 1
    x_ND = code_ND / np.sqrt((code_ND**2).mean(axis=1, keepdims=True))
    gate_NF, up_NF = x_ND @ gate_FD.T, x_ND @ up_FD.T
    hidden_NF = gate_NF / (1 + np.exp(-gate_NF)) * up_NF
    change_ND = np.roll(code_ND, -1, axis=0) - code_ND
    down_FD = np.linalg.lstsq(hidden_NF * works_F, change_ND, rcond=None)[0]
    size = np.linalg.norm(down_FD[works_F], axis=1).mean() / np.sqrt(WIDTH)
    idle_FD = size * np.random.default_rng(1).standard_normal(down_FD.shape)
    idle_FD[:, [*NEVER, ALWAYS]] = 0
    return gate_FD, up_FD, np.where(works_F[:, None], down_FD, idle_FD)
