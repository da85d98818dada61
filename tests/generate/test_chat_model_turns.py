"""Conversations with SmolLM2-135M-Instruct compared with transformers, after `make smollm2`: `-m
slow`.

transformers has the same weights in f32, its own rendering of the template and its own loop. Where
the two first differ, transformers' logits of the two tokens must be within TIE of each other."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from gguf.quants import dequantize
from models import sizes_of
from paths import ROOT
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from hotsplit import Engine
from hotsplit.artifacts.model_file import ModelFile
from hotsplit.convert.convert import convert
from hotsplit.convert.options import ConvertConfig
from hotsplit.files.gguf_file import type_of
from hotsplit.options.generation_options import GenerationOptions, SamplingOptions
from hotsplit.runtime.generate.chat import ChatOptions, Conversation
from hotsplit.runtime.generate.sampler_chain import SamplerChain
from hotsplit.runtime.text.chat_template import chat_template_of

FOLDER = ROOT / "build" / "smollm2"
SOURCE = "SmolLM2-135M-Instruct.Q4_1.gguf"
LENGTH = 16
TIE = 0.02  # two tokens tie if their logits, about 20, differ by less
SUBJECTS = (
    "the sea",
    "a bicycle",
    "bread",
    "the moon",
    "Rome",
    "a violin",
    "bees",
    "gravity",
    "chess",
    "tea",
    "the alphabet",
    "a volcano",
    "glass",
    "the number zero",
    "whales",
    "a compass",
    "rain",
    "paper",
    "the heart",
    "coffee",
    "a bridge",
    "silk",
    "iron",
    "a library",
    "time",
)
PROMPTS = [f"What is {subject}?" for subject in SUBJECTS] + [
    f"Write two lines about {subject}. \u00e9\U0001f98a" for subject in SUBJECTS
]
LATER = ("Say that in one sentence.", "Why does it matter?")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (FOLDER / "f16.gguf").exists(), reason="make smollm2 makes the model"),
]


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("smollm2") / "f32.gguf"
    convert(ConvertConfig(source=FOLDER / "f16.gguf", output=path, outtype="f32"))
    return path


@pytest.fixture(scope="module")
def engine(path) -> Iterator[Engine]:
    with Engine.load(path, mode="dense", context_length=2048, num_sequences=2) as engine:
        yield engine


@pytest.fixture(scope="module")
def theirs(path) -> LlamaForCausalLM:
    """transformers' model of the same weights."""
    file = ModelFile.load(path)
    s = sizes_of(file.bare_spec)
    config = LlamaConfig(
        vocab_size=s.vocab_size,
        hidden_size=s.hidden_size,
        intermediate_size=s.num_neurons,
        num_hidden_layers=s.num_layers,
        num_attention_heads=s.num_heads,
        num_key_value_heads=s.num_kv_heads,
        head_dim=s.head_dim,
        rms_norm_eps=s.epsilon,
        rope_parameters={"rope_type": "default", "rope_theta": file.spec.rotary.theta},
        max_position_embeddings=s.context_length,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=[0, 2],
        pad_token_id=2,
    )

    def read(name: str) -> torch.Tensor:
        entry = file.tensors[name]
        return torch.from_numpy(dequantize(entry.read(), type_of(entry.kind)).copy())

    def unpermuted(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
        """Undoes the order of GGUF, in which values that are rotated together are adjacent."""
        halves = weight.reshape(num_heads, s.head_dim // 2, 2, s.hidden_size)
        return halves.transpose(1, 2).reshape(weight.shape)

    state = {
        "model.embed_tokens.weight": read("token_embd.weight"),
        "lm_head.weight": read("token_embd.weight"),
        "model.norm.weight": read("output_norm.weight"),
    }
    for n in range(s.num_layers):
        ours, name = f"blk.{n}.", f"model.layers.{n}."
        state |= {
            f"{name}input_layernorm.weight": read(f"{ours}attn_norm.weight"),
            f"{name}post_attention_layernorm.weight": read(f"{ours}ffn_norm.weight"),
            f"{name}self_attn.q_proj.weight": unpermuted(read(f"{ours}attn_q.weight"), s.num_heads),
            f"{name}self_attn.k_proj.weight": unpermuted(
                read(f"{ours}attn_k.weight"), s.num_kv_heads
            ),
            f"{name}self_attn.v_proj.weight": read(f"{ours}attn_v.weight"),
            f"{name}self_attn.o_proj.weight": read(f"{ours}attn_output.weight"),
            f"{name}mlp.gate_proj.weight": read(f"{ours}ffn_gate.weight"),
            f"{name}mlp.up_proj.weight": read(f"{ours}ffn_up.weight"),
            f"{name}mlp.down_proj.weight": read(f"{ours}ffn_down_t.weight").T.contiguous(),
        }
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model = model.to_empty(device="cpu")
    model.load_state_dict(state)
    model.model.rotary_emb.__init__(config)  # to_empty left its frequencies uninitialized
    return model.eval()


@dataclass
class Count:
    answers: int = 0
    tokens: int = 0
    first_differences: int = 0


def conversation(engine: Engine, length: int = LENGTH) -> Conversation:
    return Conversation(
        engine.sequence(),
        engine.codec,
        chat_template_of(engine.model, engine.codec),
        engine.traffic,
        SamplerChain(SamplingOptions(temperature=0.0), engine.model.spec.vocab_size),
        options=ChatOptions(generation=GenerationOptions(max_tokens=length)),
    )


def margin(model: LlamaForCausalLM, prompt: list[int], said: list[int], ours: int) -> float:
    """The difference in logits between their next token and ours."""
    with torch.inference_mode():
        logits_V = model(torch.tensor([prompt + said])).logits[0, -1]
    return float(logits_V.max() - logits_V[ours])


def test_three_turns_of_fifty_conversations(engine, theirs, capsys):
    tokenizer = AutoTokenizer.from_pretrained(FOLDER, gguf_file=SOURCE)
    counts, margins = [Count() for _ in range(3)], []
    kept = []
    for prompt in PROMPTS:
        with conversation(engine) as chat:
            for turn, message in enumerate((prompt, *LATER)):
                ids = [token.id for token in chat.say(message) if token.id is not None]
                kept.append((turn, chat.run.cached_tokens, chat.run.prefill_tokens))
                asked = tokenizer.apply_chat_template(
                    chat.messages[:-1], add_generation_prompt=True, return_dict=False
                )
                assert len(asked) == chat.run.prefill_tokens
                assert asked == chat._sequence.ids[: len(asked)]
                out = theirs.generate(
                    torch.tensor([asked]),
                    attention_mask=torch.ones(1, len(asked)),
                    max_new_tokens=LENGTH,
                    do_sample=False,
                )
                want = [token for token in out[0, len(asked) :].tolist() if token not in (0, 2)]
                same = next(
                    (n for n, (a, b) in enumerate(zip(ids, want, strict=False)) if a != b),
                    min(len(ids), len(want)),
                )
                counts[turn].answers += 1
                counts[turn].tokens += same
                if ids != want:
                    counts[turn].first_differences += 1
                    end = ids[same] if same < len(ids) else 2
                    margins.append(margin(theirs, asked, want[:same], end))
                    assert margins[-1] < TIE, (prompt, turn, same)
    with capsys.disabled():
        print("\n", counts, "margins", [round(m, 5) for m in margins])
        shares = [cached / whole for turn, cached, whole in kept if turn]
        print("kept of later prompts", min(shares), sum(shares) / len(shares))
    assert sum(count.answers for count in counts) == 150
    assert sum(count.first_differences for count in counts) <= 8
    # An answer's text may encode to tokens other than those generated, which are then recomputed.
    assert all(cached >= 0.4 * whole for turn, cached, whole in kept if turn)


def test_the_second_turn_starts_sooner_than_a_new_conversation(engine):
    def first(chat: Conversation, text: str) -> float:
        began = time.perf_counter()
        tokens = chat.say(text)
        next(token for token in tokens if token.id is not None)
        seconds = time.perf_counter() - began
        tokens.close()
        return seconds

    long = "Tell me about this. " + "The history of computing begins long before. " * 60
    later, nothing = [], []
    for _ in range(3):
        with conversation(engine, 8) as chat, conversation(engine, 8) as other:
            for _ in chat.say(long):
                pass
            other.messages = list(chat.messages)
            later.append(first(chat, LATER[0]))
            nothing.append(first(other, LATER[0]))
            assert chat.run.cached_tokens > 500 and other.run.cached_tokens == 0
    assert sorted(later)[1] < 0.5 * sorted(nothing)[1], (later, nothing)
