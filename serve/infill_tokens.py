"""The tokens between which models of code fill in the middle of a text (arXiv 2207.14255)."""

from dataclasses import dataclass

from tokenizers import Tokenizer

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.runtime.text.codec import named_id
from hotsplit.tokens.tokenizer_kinds import CODE_TEXTS, INFILL_TEXTS

_TEXTS = {**INFILL_TEXTS, **CODE_TEXTS}
# Names of llama.cpp's keys before there were those of fim_*.
_OLD_KINDS = {"fim_pre": "prefix", "fim_suf": "suffix", "fim_mid": "middle"}


@dataclass(frozen=True, kw_only=True)
class InfillTokens:
    """Ids of tokens: before a prefix, before a suffix, before the middle; of a model trained on
    whole repositories, before the name of a repository and of a file, too."""

    prefix: int
    suffix: int
    middle: int
    repository: int | None
    file: int | None


def infill_tokens(model: ModelFile, tokenizer: Tokenizer) -> InfillTokens | None:
    """The tokens that the file names, and otherwise those with a known text, as in llama.cpp. None
    if there is no prefix, suffix or middle. Raises HotsplitError for a key that is not a
    number."""

    def token(kind: str) -> int | None:
        for name in (kind, _OLD_KINDS.get(kind)):
            if name is not None and (named := named_id(model, name)) is not None:
                return named
        known = (tokenizer.token_to_id(text) for text in _TEXTS[kind])
        return next((i for i in known if i is not None and i < model.spec.vocab_size), None)

    prefix, suffix, middle = map(token, INFILL_TEXTS)
    if prefix is None or suffix is None or middle is None:
        return None
    return InfillTokens(
        prefix=prefix,
        suffix=suffix,
        middle=middle,
        repository=token("fim_rep"),
        file=token("fim_sep"),
    )
