"""Tiny assistants of Gemma 4, and transformers' logits of them."""

from contextlib import contextmanager

import pytest
import torch
from checkpoints import random_model, save_tokenizer
from test_families import GATED, GEMMA4
from transformers import (
    AutoModelForCausalLM,
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
    Gemma4TextConfig,
)

_SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48}
_FREE = {"vocab_size_per_layer_input": 0, "layer_types": ["sliding_attention", "full_attention"]}
_SAME = ("vocab_size", "max_position_embeddings", "sliding_window", "rope_parameters")


@contextmanager
def assistants_of_transformers():
    """transformers 5.23 refuses a model whose layers all read those of another, as its assistants
    do: its check is for layers of the same model."""
    own = Gemma4TextConfig.kv_sharing_modes.fget

    def modes(config):
        count = config.num_hidden_layers
        return ["reuse"] * count if config.num_kv_shared_layers == count else own(config)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Gemma4TextConfig, "kv_sharing_modes", property(modes))
        yield


def assistant_config(main, **options):
    """Heads of keys as those of the main model; other numbers of its own."""
    heads = [main.per_layer_config[main.layer_types.index(kind)] for kind in _FREE["layer_types"]]
    text = GATED | GEMMA4 | _SIZES | _FREE | {key: getattr(main, key) for key in _SAME}
    text |= {
        "head_dim": heads[0].head_dim,
        "global_head_dim": heads[1].head_dim,
        "num_key_value_heads": heads[0].num_key_value_heads,
        "num_global_key_value_heads": heads[1].num_key_value_heads,
        "attention_k_eq_v": heads[0].num_key_value_heads != heads[1].num_key_value_heads,
    }
    config = {"text_config": Gemma4TextConfig(**text), "backbone_hidden_size": main.hidden_size}
    return Gemma4AssistantConfig(**config | options)


def random_assistant(folder, main, *, seed=0, **options):
    """A checkpoint for a main model with this config."""
    with assistants_of_transformers():
        random_model(folder, assistant_config(main, **options), seed=seed)
    save_tokenizer(folder, 320)
    return folder


@torch.no_grad()
def logits_of_transformers(main_folder, own_folder, ids, num_chained):
    """The logits of the guesses after each token but the first, [T - 1, V], and of further ones
    after the last one, as SinglePositionMultiTokenCandidateGenerator chains them. Of layers with
    windows an assistant gets what transformers' cache keeps: a window less the token that has no
    keys yet, as in llama.cpp."""
    main = AutoModelForCausalLM.from_pretrained(main_folder, attn_implementation="eager").eval()
    with assistants_of_transformers():
        own = Gemma4AssistantForCausalLM.from_pretrained(own_folder, attn_implementation="eager")
    embed, rows = main.get_input_embeddings(), []
    for length in range(1, len(ids)):
        out = main(torch.tensor([ids[:length]]), output_hidden_states=True, use_cache=True)
        caches = zip(main.config.layer_types, out.past_key_values.layers, strict=True)
        own_L = ((kind, layer) for kind, layer in caches if layer.keys is not None)
        kept = {kind: (layer.keys, layer.values) for kind, layer in own_L}  # the last of a kind
        assert kept["sliding_attention"][0].shape[2] == min(length, main.config.sliding_window - 1)
        hidden, token = out.hidden_states[-1][:, -1:], ids[length]
        for _ in range(1 + (num_chained if length == len(ids) - 1 else 0)):
            found = own.eval()(
                inputs_embeds=torch.cat([embed(torch.tensor([[token]])), hidden], dim=-1),
                position_ids=torch.tensor([[length]]),
                shared_kv_states=kept,
                use_cache=False,
            )
            rows.append(found.logits[0, 0])
            hidden, token = found.last_hidden_state, int(found.logits.argmax())
    return torch.stack(rows)
