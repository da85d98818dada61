"""The README's summary, in English and Chinese: what to expect of each kind of model, and what
the expectation rests on. The numbers of both are the same by construction."""

from dataclasses import dataclass

from table_contents import TYPES, ZEN_4, ZEN_5, markdown, path_of, result, times
from table_gpu import DIVIDED, WHOLE, rows_of
from table_speed import EXPERTS, GEMMA, chat

PLANTED = (f"decode-{ZEN_5}", f"decode-{ZEN_4}", "decode-intel-xeon-processor-2.50ghz")


@dataclass(frozen=True, kw_only=True)
class Words:
    """The text of the table in one language."""

    header: tuple[str, str, str, str]
    real: str
    downloaded: str
    gemma: str
    synthetic: str
    between: str
    dense: str
    no_loss: str
    larger: str
    mixtures: str
    layers: str
    relu: str
    twin: str
    unknown_loss: str
    on_gpu: str
    synthetic_7b: str
    in_budget: str


ENGLISH = Words(
    header=("kind of model", "evidence", "decode speed", "loss"),
    real="real: SmolLM2-135M",
    downloaded="a downloaded GGUF, Q4_K_M",
    gemma="real: Gemma 3 270M",
    synthetic="synthetic: random weights, 1.1 B",
    between="{slow} to {fast} llama.cpp",
    dense="SiLU chat model, dense, {kind}",
    no_loss="the type's rounding",
    larger="dense, larger, q8_0",
    mixtures="mixture of experts, on the CPU",
    layers="synthetic: layers of Qwen3-30B, Qwen3.6-35B, gpt-oss-20b",
    relu="ReLU model, a tenth of the neurons fire, q8_0",
    twin="{range} with a twin without silent neurons",
    unknown_loss="unknown: the weights mean nothing",
    on_gpu="the same, f16, 45 to 80 % on an H100",
    synthetic_7b="synthetic: random weights, 7 B",
    in_budget="{twin}; dense, all there: {dense}",
)
CHINESE = Words(
    header=("模型种类", "依据", "解码速度", "损失"),
    real="真实：SmolLM2-135M",
    downloaded="下载的 GGUF，Q4_K_M",
    gemma="真实：Gemma 3 270M",
    synthetic="合成：随机权重，1.1 B",
    between="llama.cpp 的 {slow} 至 {fast}",
    dense="SiLU 对话模型，dense，{kind}",
    no_loss="仅该类型的舍入误差",
    larger="dense，更大的模型，q8_0",
    mixtures="混合专家模型，在 CPU 上",
    layers="合成：Qwen3-30B、Qwen3.6-35B、gpt-oss-20b 的若干层",
    relu="ReLU 模型，十分之一的神经元激活，q8_0",
    twin="{range}；它运行没有静默神经元的同形模型",
    unknown_loss="未知：权重没有意义",
    on_gpu="同上，f16，45 % 至 80 % 放在 H100 上",
    synthetic_7b="合成：随机权重，7 B",
    in_budget="{twin}；dense，全部在显卡上：{dense}",
)


def between(words: Words, ratios: list[float]) -> str:
    """The lowest and the highest of the processors' ratios, in words."""
    return words.between.format(slow=times(min(ratios)), fast=times(max(ratios)))


def planted(mode: str) -> list[float]:
    return [result(name)["types"]["q8_0"]["2"][mode]["times_rival"] for name in PLANTED]


def downloaded() -> list[float]:
    """Decode of a real file at two levels."""
    tests = [test for name in GEMMA.values() for test in result(name)["tests"]]
    return [test["ratio"] for test in tests if test["n_gen"]]


def of_experts() -> list[float]:
    """Decode of dense mixtures with two threads."""
    names = [f"experts-{model}-{kind}-{ZEN_4}" for model, kind in EXPERTS]
    return [result(name)["2"]["decode"]["times_rival"] for name in names if path_of(name).exists()]


def chat_ratios(kind: str) -> list[float]:
    names = (f"chat-model-{ZEN_4}", f"chat-model-{ZEN_5}")
    return [chat(kind, name)["decode"]["times_rival"] for name in names]


def expected(words: Words) -> str:
    rows = [[words.downloaded, words.gemma, between(words, downloaded()), words.no_loss]]
    rows += [
        [
            words.dense.format(kind=kind),
            words.real,
            between(words, chat_ratios(kind)),
            words.no_loss,
        ]
        for kind in TYPES
    ]
    larger = between(words, planted("dense"))
    rows.append([words.larger, words.synthetic, larger, words.no_loss])
    rows.append([words.mixtures, words.layers, between(words, of_experts()), words.no_loss])
    twin = words.twin.format(range=between(words, planted("predicted")))
    rows.append([words.relu, words.synthetic, twin, words.unknown_loss])
    ratio_of = {row["mode"]: row["times_rival"] for row in rows_of("7B", WHOLE)}
    found = between(words, [row["times_rival"] for row in rows_of("7B", DIVIDED)])
    speed = words.in_budget.format(
        twin=words.twin.format(range=found), dense=times(ratio_of["dense"])
    )
    rows.append([words.on_gpu, words.synthetic_7b, speed, words.unknown_loss])
    return markdown(words.header, rows)


TABLES = {"expected": lambda: expected(ENGLISH), "expected zh": lambda: expected(CHINESE)}
