"""The tokens that end a text or a turn: those that a model file names and, as in llama.cpp, every token
with one of some known texts, whatever its type. Files often name only one of several, or that of
the base model before it was trained to chat."""

from itertools import product

from tokenizers import Tokenizer

from hotsplit.artifacts.model_file import END_KEY, ModelFile
from hotsplit.runtime.text.token_ids import checked_id, named_id

END_KINDS = ("eos", "eot", "eom")  # end of a text, a turn, a message
# llama.cpp's special_eog_ids (llama-vocab.cpp, 2026).
END_TEXTS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>",
    "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]",
    "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "[e~[",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
)  # fmt: skip
# Tokens around the files of a repository, behind which a completion of code ends; a file may name
# one of each kind, and otherwise they are known by their texts.
CODE_TEXTS = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
# A text that ends nothing in a vocabulary that has all of the others: there it ends a part of a
# turn (Harmony, Solar), or is HTML (Gemma).
NOT_ENDS = (
    *(
        ("<|end|>", {*pair})
        for pair in product(("<|return|>", "<|flush|>"), ("<|call|>", "<|calls|>"))
    ),
    ("</s>", {"<|tool_response>"}),
)
CONTROL_TEXTS = frozenset(END_TEXTS).union(*CODE_TEXTS.values())


def end_ids(model: ModelFile, tokenizer: Tokenizer) -> frozenset[int]:
    """All tokens that end a text of this model. Raises HotsplitError for a list in the file that
    has anything but ids of tokens."""
    named = {kind: named_id(model, kind) for kind in (*END_KINDS, *CODE_TEXTS)}
    unnamed = (texts for kind, texts in CODE_TEXTS.items() if named[kind] is None)
    known = {
        text: token_id
        for texts in (END_TEXTS, *unnamed)
        for text in texts
        if (token_id := tokenizer.token_to_id(text)) is not None
        and token_id < model.spec.vocab_size
    }
    no_ends = {known.get(text) for text, others in NOT_ENDS if others <= known.keys()}
    listed = model.extra_keys.get(END_KEY, [])
    numbers = listed if isinstance(listed, list) else [listed]
    return frozenset({
        *(i for i in (*known.values(), *named.values()) if i is not None and i not in no_ends),
        *(checked_id(model, END_KEY, number) for number in numbers),
    })  # fmt: skip
