"""Lines of every kind on which tokenizers have disagreed, and tokenizers for them."""

import itertools
import json
import random
from functools import cache
from pathlib import Path

from case_tables import cells
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

SPACE = "\u2581"
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_SPLIT = LLAMA3_SPLIT.replace("{1,3}", "")
QWEN35_SPLIT = QWEN2_SPLIT.replace(r"]?\p{L}+", r"]?[\p{L}\p{M}]+").replace(
    r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]"
)
# Expressions of published tokenizers, from the notes in llama.cpp's src/llama-vocab.cpp.
PUBLISHED = {
    "tekken": [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "gpt-4o": [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re"
        r"|'ve|'m|'ll|'d)?"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t"
        r"|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "kimi-k2": [
        r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "bailingmoe": [
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
        r"|\s*[\r\n]|\s+(?!\S)|\s+"
    ],
    "exaone-moe": [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
    ],
    "minicpm5": [
        r"\p{N}{1,3}",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}+| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    ],
    "jais-2": [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)"
        r"|\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S)|\s{8}(?!\S)|\s{4}(?!\S)|\s{1,2}(?!\S)|\s{1}"
    ],
    "deepseek-v3": [
        r"\p{N}{1,3}",
        "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ],
}
COMBINING = ["e\u0301te\u0301", "a\u0308 o\u0308u\u0308", "n\u0303 c\u0327a", "\u1100\u1161\u11a8"]
PLAIN = cells(
    " |   |    |     | \t | \n | \r\n | \n\n\n |  \n | \n  |  \r\n \t\r\n | a |  a | a  |  a  | "
    "  a  b   c    d     e | \ta\t\tb | a\nb\r\nc\rd | a \n b | a\n\n\n  b\n |     return x | "
    "\tfor (int i = 0; i < n; ++i) { | x = [1, 22, 333, 4444, 55555, 666666] | 0 | 12 | 123 | "
    "1234 | 12345678901234567890 | 3.14159e-10 | 1,000,000.00 | v1.2.3-rc4 | "
    "it's they're we've I'm you'll he'd IT'S THEY'RE WE'VE I'M YOU'LL HE'D don't o'clock 's 're | "
    "''' \"\"\" ``` --- *** ### !!! ??? ... ;;; ::: /// | a.b,c;d:e!f?g | (a)[b]{c}<d> | "
    "->=>== | def add(a, b):\n    return a + b\n | if (a && b || !c) { d ^= e >> 3; } // no | "
    "#!/bin/sh | https://example.org/a?b=c&d=%20#e | user@example.org | C:\\Windows\\System32 | "
    "\\n\\t\\u00e9 | "
    "Z\xfcrich na\xefve caf\xe9 \xc5ngstr\xf6m \u0152uvre stra\xdfe \u0130stanbul | "
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002 | \u4f60\u597dhello\u4e16\u754c123\u3002 | "
    "\u3053\u3093\u306b\u3061\u306f \u30ab\u30bf\u30ab\u30ca | \uc548\ub155\ud558\uc138\uc694 | "
    "\u041f\u0440\u0438\u0432\u0435\u0442, \u043c\u0438\u0440! | "
    "\u03b1\u03b2\u03b3 \u2260 \u03c9 | \u0645\u0631\u062d\u0628\u0627 \u0628\u0643 | "
    "\u05e9\u05dc\u05d5\u05dd | \u0928\u092e\u0938\u094d\u0924\u0947 | "
    "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35 | \U0001f600 | \U0001f600\U0001f601 \U0001f602 | "
    "\U0001f468\u200d\U0001f469\u200d\U0001f467 | \U0001f1e8\U0001f1ed | "
    "\U0001f44d\U0001f3fd ok | \u2764\ufe0f | a\xa0b\u2003c\u2009d\u200be\u3000f | "
    "\u2028\u2029 | \x85 | \x00 | a\x00b | \x01\x02\x1b[0m\x7f | \ufeffbom | \xad soft | "
    "\u202eright | \ufffd | \U000f0000 private | \U0010ffff | "
    "\xb2\xb3\xbd\u2460\u2167\u0661\u0662 | x\xb2+y\xb2=1 | \U0001d7d8\U0001d7d9 | "
    "\u216f\u3007 | \u01c5\u02b0\xaa\xba | \u2200x\u2208\u211d: x\xb2 \u2265 0 | "
    "\u20ac5 \xa310 \xa5100 | \xa9\xae\u2122 | <|endoftext|> | a<|endoftext|>b | "
    " <|endoftext|>  | <|endoftext|><|endoftext|> | <s> | a</s> b | <unk> | <0x0A> | <tool> | "
    "a <tool> b | <tool><tool> | [PAD300] | \u2581 | a\u2581b \u2581 c | "
    "quick brown  fox\tjumps  over\r\nthe lazy   dog | thethethe quickquick foxfox | "
    "lazylazy dogdog"
)
_PARTS = cells(
    "the | quick | def | return | add(a, b) |   |    |     | \t | \n | \r\n | 1 | 42 | 1234567 | "
    "'s | 'LL | . | , | !? | _ | \u4f60\u597d | \u4e16 | \U0001f600 | \xe9 | \xfc | "
    "\u0416\u0437 | \xa0 | \x00 | \x1b | ( | ) | {} | == | -> | \xb2 | <tool> | <|endoftext|>"
)


# On which expressions differ, or engines that read them.
HARD = cells(
    "\u0928\u092e\u0938\u094d\u0924\u0947 \u0926\u0941\u0928\u093f\u092f\u093e | "
    "\u0e44\u0e17\u0e22\u0e19\u0e49\u0e33 \u0e20\u0e32\u0e29\u0e32 | HelloWORLD helloWorld | "
    "\xc9cole\xc9COLE \xe9Cole \u041f\u0440\u0438\u0432\u0435\u0442\u041c\u0438\u0440 | "
    "\u03b1\u0391 \u03a9\u03c9 \u01c5ungla | iPhone's DON'T McDonald'S | "
    "abc1234567 12 1234 a  1234  5 | a \n\n 123\n\n\n  b | x/y//z/\n\n/ | "
    "\uc870\uc120\ub9d0\u314b\u314b | \u6570\u5b66123\u6f22\u5b57\u304b\u306a\u30ab\u30ca | "
    "\uff41\uff21\uff11\uff12\uff13 | tab\t\tx  \n | <sentinel:12> IMGIMGABZ x | "
    " \u3000x\u3000\u3000y | 1234567890123 | "
    "\u0967\u0968\u0969\u096a\u096b \u0663\u0664\u0665\u0666 | \r\n\r\nx\r\ry | "
    "\u2018q\u2019 \u201ct\u201d \u2014d\u2026 | \u3105\u3106\u3107"
)
HARD.append("a" * 30 + " " * 600 + "b")


def mixed_lines() -> list[str]:
    """Over 250 texts: those above, and random mixtures of their parts."""
    random_source = random.Random(7)
    mixtures = [
        "".join(random_source.choices(_PARTS, k=random_source.randint(2, 12))) for _ in range(150)
    ]
    return PLAIN + COMBINING + mixtures


def training_text() -> list[str]:
    """A text to train the tests' tokenizers on: some words, and everything above."""
    words = ["the quick brown fox jumps over the lazy dog", "def add(a, b):\n    return a + b\n"]
    return words * 4 + mixed_lines() * 2


def byte_level_tokenizer(pre: str, vocab_size: int) -> Tokenizer:
    """A byte-level BPE as it is published under llama.cpp's name `pre`."""
    return Tokenizer.from_str(_byte_level_text(pre, vocab_size))


@cache
def _byte_level_text(pre: str, vocab_size: int) -> str:
    tokenizer = Tokenizer(models.BPE(ignore_merges=pre == "llama-bpe"))
    split = {
        "llama-bpe": LLAMA3_SPLIT,
        "smaug-bpe": LLAMA3_SPLIT,
        "qwen2": QWEN2_SPLIT,
        "qwen35": QWEN35_SPLIT,
    }.get(pre)
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    first = [] if split is None else [pre_tokenizers.Split(Regex(split), "isolated")]
    if pre == "smollm":
        first = [pre_tokenizers.Digits(individual_digits=True)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*first, last])
    if pre in ("qwen2", "qwen35"):
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(training_text(), trainer)
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    if pre == "llama-bpe":
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
        )
    return tokenizer.to_str()


def whole_line_tokenizer(vocab_size: int) -> Tokenizer:
    """A byte-level BPE whose merges go across words, so that any other split gives other tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(training_text() + HARD * 4, trainer)
    return tokenizer


def sentencepiece_tokenizer(vocab_size: int, is_complete: bool = True) -> Tokenizer:
    """A tokenizer as Llama 2's was published: bytes, merges by score, a space put before the text.

    If `is_complete`, every pair of tokens whose texts join to a third is a merge, as in tokenizers
    made of SentencePiece models; else only the merges of the training are, as `tokenizers` trains
    them."""
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", SPACE)
    trained.pre_tokenizer = pre_tokenizers.Split(
        Regex(f"{SPACE}+[^{SPACE}]*|[^{SPACE}]+"), "isolated"
    )
    trainer = trainers.BpeTrainer(vocab_size=vocab_size - 260, show_progress=False)
    # llama.cpp reads a token only up to a NUL, and takes what looks like a control token for one.
    ascii_lines = [t for t in training_text() if t.isascii() and "\0" not in t and "<" not in t]
    trained.train_from_iterator(ascii_lines, trainer)
    table = json.loads(trained.to_str())["model"]
    learned = ["".join(merge) for merge in table["merges"]]
    letters = sorted(token for token in table["vocab"] if len(token) == 1)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    ids = {token: i for i, token in enumerate([*tokens, *dict.fromkeys(learned), *letters])}
    merges = [tuple(merge) for merge in table["merges"]]
    if is_complete:
        cuts = [(t[:i], t[i:]) for t in dict.fromkeys(learned) for i in range(len(t) - 1, 0, -1)]
        merges = [pair for pair in cuts if pair[0] in ids and pair[1] in ids]
    tokenizer = Tokenizer(
        models.BPE(ids, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
    )
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    tokenizer.add_special_tokens(
        [AddedToken(text, normalized=False) for text in ("<unk>", "<s>", "</s>")]
    )
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return tokenizer


def merge_by_score(text: str, tokens: list[str], scores: list[float]) -> list[int]:
    """llama.cpp's SentencePiece: joins the adjacent pair with the highest score, the leftmost of
    equal ones, until none is a token; the ids of what is left, in bytes where unknown."""
    ids = {token: i for i, token in enumerate(tokens)}
    pieces = list(SPACE + text.replace(" ", SPACE))
    while True:
        pairs = [a + b for a, b in itertools.pairwise(pieces)]
        known = [(-scores[ids[p]], i) for i, p in enumerate(pairs) if p in ids]
        if not known:
            break
        _, i = min(known)
        pieces[i : i + 2] = [pairs[i]]
    return [n for p in pieces for n in ([ids[p]] if p in ids else [3 + b for b in p.encode()])]


def put_tokenizer(folder: Path, tokenizer: Tokenizer, begin: str, end: str) -> None:
    """Writes tokenizer.json and tokenizer_config.json of a checkpoint."""
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": begin, "eos_token": end}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
