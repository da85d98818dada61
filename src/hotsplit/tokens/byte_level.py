"""Pre-tokenizers of byte-level BPE, under llama.cpp's names.

`convert` writes the name as `tokenizer.ggml.pre`, and `runtime` builds a tokenizer from it. The
expressions are those that models are published with where they are known (llama.cpp's
src/llama-vocab.cpp quotes many), else llama.cpp's. llama.cpp has other expressions for some,
because its engine lacks the classes of capitals and small letters: `in_llama_cpp` says which text
it splits otherwise; all other text has the same tokens there. (There is one more difference:
llama.cpp has the tables of Unicode 15.1, `tokenizers` those of Unicode 16. The 4,382 letters and
digits that were added in between are symbols to llama.cpp.) docs/tokenizers.md says how to add
one."""

from dataclasses import dataclass
from typing import Any

_ENDS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_CONTRACTIONS = _ENDS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
_LINES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPACES = r"| ?[^\s\p{L}\p{N}]+[\r\n]*" + _LINES
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_QWEN35 = _ENDS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + _LINES
_DEEPSEEK = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*" + _LINES
)
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_CHINESE = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_CHINESE_AND_JAPANESE = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
# Letters of scripts that have capitals, as DeepSeek's first models have them.
_CASED_LETTERS = (
    "A-Za-z\xb5\xc0-\xd6\xd8-\xf6\xf8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-"
    "\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5"
    "\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-"
    "\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d"
    "\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4"
    "\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec"
    "\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-"
    "\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f"
    "\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-"
    "\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-"
    "\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)


def _words(upper: str, lower: str, ends: str = "") -> str:
    """Words of some capitals, then small letters, either of which may be missing."""
    before = r"[^\r\n\p{L}\p{N}]?"
    return f"{before}{upper}*{lower}+{ends}|{before}{upper}+{lower}*{ends}|"


_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_NOT_HAN = r"&&[^\p{Han}]]"
_SLASHES = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _LINES
_GPT4O = _words(_UPPER, _LOWER, _ENDS + "?") + r"\p{N}{1,3}" + _SLASHES
# Kinds of text; tests/llamacpp/test_tokens.py says which lines they are.
_MARKS, _CASES = "words with combining marks", "words with capitals beyond ASCII"
_ANY_CASES, _NUMBERS = "words with capitals after small letters", "numbers and what is before them"
_SPACES_BEYOND, _DIGITS_BEYOND = "white space beyond ASCII", "digits beyond ASCII"


@dataclass(frozen=True)
class ByteLevelKind:
    name: str  # written by convert
    other_names: str = ""  # for the same kind in third-party files, with spaces between them
    # Each splits what the ones before it have left; (): GPT-2's, built into tokenizers' ByteLevel.
    patterns: tuple[str, ...] = ()
    splits_digits: bool = False  # every digit is a word, split before the pattern applies
    whole_words_first: bool = False  # a word that is itself a token is not built by merges
    is_published_with_nfc: bool = False  # tokenizer.json normalises to NFC; llama.cpp does not
    adds_begin: bool = False  # llama.cpp's default if the file does not state it
    in_llama_cpp: tuple[str, ...] = ()  # kinds of text that llama.cpp splits otherwise


def _kind(names: str, *patterns: str, **rest: Any) -> ByteLevelKind:
    name, _, other_names = names.partition(" ")
    return ByteLevelKind(name, other_names, patterns, **rest)


# The other names are those that llama.cpp gives the same pattern, whether or not there is a graph
# here for the models that are published with them.
BYTE_LEVEL_KINDS = (
    _kind(
        "gpt-2 phi-2 jina-es jina-de jina-v2-es jina-v2-de gigachat a.x-4.0 mellum modern-bert"
        " mpt olmo jais trillion granite-docling exaone4 jina-v1-en jina-v2-code roberta-bpe"
    ),
    _kind(
        "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2", splits_digits=True
    ),
    _kind(
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
        _CONTRACTIONS + r"\p{N}{1,3}" + _SPACES,
        whole_words_first=True,
        adds_begin=True,
    ),
    _kind("smaug-bpe dbrx chatglm-bpe glm4", _CONTRACTIONS + r"\p{N}{1,3}" + _SPACES),
    _kind(
        "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2",
        _CONTRACTIONS + r"\p{N}" + _SPACES,
        is_published_with_nfc=True,
    ),
    # Qwen 3.5 and 3.6: marks, as in Thai and Hindi, belong to words.
    _kind("qwen35", _QWEN35, is_published_with_nfc=True),
    _kind("falcon", r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"),
    _kind("default", r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    _kind(
        "tekken",
        _words(_UPPER, _LOWER) + r"\p{N}" + _SLASHES,
        whole_words_first=True,
        adds_begin=True,
        in_llama_cpp=(_MARKS, _CASES),
    ),
    _kind("gpt-4o llama4 kanana2 talkie minimax-m2", _GPT4O, in_llama_cpp=(_MARKS, _CASES)),
    _kind("granite-embed-multi-97m", _GPT4O, whole_words_first=True, in_llama_cpp=(_CASES,)),
    _kind(
        "tiny_aya cohere2moe",
        r"\d{1,3}(?=(?:\d{3})*\b)",
        _GPT4O,
        in_llama_cpp=(_ANY_CASES, _CASES, _NUMBERS),
    ),
    _kind(
        "kimi-k2",
        r"[\p{Han}]+|"
        + _words(_UPPER[:-1] + _NOT_HAN, _LOWER[:-1] + _NOT_HAN, _ENDS + "?")
        + r"\p{N}{1,3}"
        + _SPACES,
        in_llama_cpp=(_MARKS, _ANY_CASES, _CASES),
    ),
    _kind(
        "youtu",
        "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c"
        "\u3001-\u303f\ufe30-\ufe4f]+|[\u3105-\u312f]+|" + _CHINESE_AND_JAPANESE,
        _words(_UPPER, _LOWER, _ENDS + "?") + r"\p{N}" + _SLASHES,
        whole_words_first=True,
        in_llama_cpp=(_ANY_CASES, _CASES),
    ),
    _kind(
        "deepseek-llm",
        r"[\r\n]",
        rf"\s?[{_CASED_LETTERS}]+",
        "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        r"\s+$",
        _CHINESE,
        r"\p{N}+",
        in_llama_cpp=(_SPACES_BEYOND,),
    ),
    _kind(
        "deepseek-coder",
        r"[\r\n]",
        r"\s?\p{L}+",
        r"\s?\p{P}+",
        _CHINESE,
        r"\p{N}",
        in_llama_cpp=(_SPACES_BEYOND,),
    ),
    _kind("deepseek-v3 hunyuan-dense joyai-llm", r"\p{N}{1,3}", _CHINESE_AND_JAPANESE, _DEEPSEEK),
    _kind(
        "afmoe",
        r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))",
        "[\u4e00-\u9fff\u3400-\u4dbf\u8c48-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf"
        "\u0e40-\u0e7f\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af"
        "\u1100-\u11ff]+",
        _DEEPSEEK,
        in_llama_cpp=(_NUMBERS,),
    ),
    _kind("seed-coder", _CONTRACTIONS + r"\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+" + _LINES),
    _kind("minicpm5", r"\p{N}{1,3}", _CONTRACTIONS + r"\p{N}+" + _SPACES, whole_words_first=True),
    _kind(
        "jais-2",
        _CONTRACTIONS
        + r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        + "".join(rf"|\s{{{count}}}(?!\S)" for count in (512, 256, 128, 64, 32, 16, 8, 4))
        + r"|\s{1,2}(?!\S)|\s{1}",
    ),
    _kind(
        "exaone-moe",
        _ENDS + r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
    ),
    _kind(
        "bailingmoe bailingmoe2 llada-moe",
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
        r"|\s*[\r\n]|\s+(?!\S)|\s+",
    ),
    _kind("superbpe", r"\p{N}+", r"(?=(\d{3})+(?!\d))", in_llama_cpp=(_DIGITS_BEYOND,)),
    _kind("laguna", r"[^\n]+|[\n]+", _CONTRACTIONS + r"\p{N}" + _SPACES),
    _kind(
        "chameleon",
        "<sentinel:[0-9]+>",
        "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
        r"([\t\n]|    |  )",
        r"\p{N}",
        r"[\p{P}!-/:-@\[-`{-~]",
        _GPT2,
        adds_begin=True,
    ),
    _kind("poro-chat bloom gpt3-finnish", _BLOOM),
    _kind("viking", _BLOOM, r"\p{N}"),
)


def kind_of(name: object) -> ByteLevelKind | None:
    """The pre-tokenizer of this name; None if it is unknown."""
    kinds = (kind for kind in BYTE_LEVEL_KINDS if name in (kind.name, *kind.other_names.split()))
    return next(kinds, None)
