"""Fixtures that more than one test file uses."""

import dataclasses
import os

import numpy as np
import pytest
import torch
from models import make_model, make_shape
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

# Without a GPU, Triton kernels run in Triton's own interpreter. It must be told before the import.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture
def codec_model(tmp_path):
    """A random model with a tokenizer of single bytes; no token ends a text."""
    vocab = {token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    model = make_model(
        shape=make_shape(vocab_size=len(vocab), context_length=64),
        extra_keys={
            "tokenizer.huggingface.json": tokenizer.to_str(),
            "tokenizer.ggml.bos_token_id": np.uint32(0),
        },
    )
    path = tmp_path / "codec.gguf"
    dataclasses.replace(model, path=path).save(path)
    return path
