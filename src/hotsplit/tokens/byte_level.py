"""Pre-tokenizers of byte-level BPE, under llama.cpp's names.

`convert` writes the name as `tokenizer.ggml.pre`, and `runtime` builds a tokenizer from it. A
pre-tokenizer is listed only if `tokenizers` and llama.cpp split text by it in the same way. (There
is one difference: llama.cpp has the tables of Unicode 15.1, `tokenizers` those of Unicode 16. The
4,382 letters and digits that were added in between are symbols to llama.cpp.)"""

from dataclasses import dataclass

# The patterns of Meta-Llama-3, Qwen2, Qwen 3.5 and Seed-Coder as in their tokenizer.json; llama.cpp's
# llama-vocab.cpp has them under these names. The other ones are as they are there.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_SPACES = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Instead of the published \p{Lu} and \p{Ll}, which llama.cpp's expressions do not have.
_BEFORE, _UPPER, _LOWER = r"[^\r\n\p{L}\p{N}]?", r"(?:(?=\p{L})[^a-z])", r"(?:(?=\p{L})[^A-Z])"


@dataclass(frozen=True, kw_only=True)
class ByteLevelKind:
    name: str  # written by convert
    other_names: tuple[str, ...] = ()  # for the same kind in third-party files
    # Each splits what the ones before it have left; (): GPT-2's, built into tokenizers' ByteLevel.
    patterns: tuple[str, ...] = ()
    splits_digits: bool = False  # every digit is a word, split before the pattern applies
    whole_words_first: bool = False  # a word that is itself a token is not built by merges
    is_published_with_nfc: bool = False  # tokenizer.json normalises to NFC; llama.cpp does not
    adds_begin: bool = False  # llama.cpp's default if the file does not state it


# The other names are those that llama.cpp gives the same pattern, whether or not it has a graph for
# the models that are published with them.
BYTE_LEVEL_KINDS = (
    ByteLevelKind(
        name="gpt-2",
        other_names=(
            "phi-2", "jina-es", "jina-de", "jina-v2-es", "jina-v2-de", "gigachat", "a.x-4.0",
            "mellum", "modern-bert", "mpt", "olmo", "jais", "trillion", "granite-docling",
        ),
    ),
    ByteLevelKind(
        name="smollm",
        other_names=(
            "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2",
        ),
        splits_digits=True,
    ),
    ByteLevelKind(
        name="llama-bpe",
        other_names=(
            "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2",
            "jina-v5-nano",
        ),
        patterns=(_CONTRACTIONS + r"\p{N}{1,3}" + _SPACES,),
        whole_words_first=True,
        adds_begin=True,
    ),
    ByteLevelKind(
        name="smaug-bpe",
        other_names=("dbrx", "chatglm-bpe", "glm4"),
        patterns=(_CONTRACTIONS + r"\p{N}{1,3}" + _SPACES,),
    ),
    ByteLevelKind(
        name="qwen2",
        other_names=(
            "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "stablelm2", "hunyuan", "solar-open",
            "grok-2",
        ),
        patterns=(_CONTRACTIONS + r"\p{N}" + _SPACES,),
        is_published_with_nfc=True,
    ),
    # Qwen 3.5 and 3.6: marks, as in Thai and Hindi, belong to words.
    ByteLevelKind(name="qwen35", patterns=(_QWEN35,), is_published_with_nfc=True),
    ByteLevelKind(name="falcon", patterns=(r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    ByteLevelKind(
        name="tekken",
        patterns=(
            rf"{_BEFORE}{_UPPER}*{_LOWER}+|{_BEFORE}{_UPPER}+{_LOWER}*|\p{{N}}"
            r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ),
        whole_words_first=True,
        adds_begin=True,
    ),
    ByteLevelKind(
        name="deepseek-v3",
        other_names=("hunyuan-dense", "joyai-llm"),
        patterns=(
            r"\p{N}{1,3}",
            "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
            r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
            r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ),
    ),
    ByteLevelKind(
        name="deepseek-coder",
        patterns=(
            r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+",
            "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}",
        ),
    ),
    ByteLevelKind(
        name="seed-coder",
        patterns=(
            _CONTRACTIONS
            + r"\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+",
        ),
    ),
    ByteLevelKind(
        name="viking",
        patterns=(
            " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+", r"\p{N}",
        ),
    ),
)  # fmt: skip
