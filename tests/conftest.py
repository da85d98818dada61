"""Fixtures that more than one test file uses."""

import dataclasses
import os

import pytest
import torch
from models import byte_level_keys, make_model, make_shape

from sparkinfer.runtime.kernels.cpu import library

# Without a GPU, Triton kernels run in Triton's own interpreter. It must be told before the import.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture
def codec_model(tmp_path):
    """A random model with a tokenizer of single bytes; no token ends a text."""
    keys, vocab_size = byte_level_keys()
    model = make_model(shape=make_shape(vocab_size=vocab_size, context_length=64), extra_keys=keys)
    path = tmp_path / "codec.gguf"
    dataclasses.replace(model, path=path).save(path)
    return path


@pytest.fixture
def restore_library():
    """Puts the level and the number of threads back."""
    threads, level = library.num_threads(), library.level()
    yield
    library.set_threads(threads)
    library.set_level(level)


@pytest.fixture(params=library.usable_levels() if library.is_available() else [])
def level(request):
    """Each instruction set that this machine has."""
    before = library.level()
    library.set_level(request.param)
    yield request.param
    library.set_level(before)
