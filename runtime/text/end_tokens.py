"""The tokens that end a text or a turn: those that a model file names and, as in llama.cpp, every token
with one of some known texts, whatever its type. Files often name only one of several, or that of
the base model before it was trained to chat."""

from itertools import product

from tokenizers import Tokenizer

from hotsplit.artifacts.model_file import END_KEY, ModelFile
from hotsplit.runtime.text.token_ids import checked_id, named_id
from hotsplit.tokens.end_texts import CODE_TEXTS, END_TEXTS

END_KINDS = ("eos", "eot", "eom")  # end of a text, a turn, a message
# A text that ends nothing in a vocabulary that has all of the others: there it ends a part of a
# turn (Harmony, Solar), or is HTML (Gemma).
NOT_ENDS = (
    *(
        ("<|end|>", {*pair})
        for pair in product(("<|return|>", "<|flush|>"), ("<|call|>", "<|calls|>"))
    ),
    ("</s>", {"<|tool_response>"}),
)


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
    return frozenset(
        {
            *(i for i in (*known.values(), *named.values()) if i is not None and i not in no_ends),
            *(checked_id(model, END_KEY, number) for number in numbers),
        }
    )
