"""The README's summary, in English and Chinese: what to expect of each kind of model, and what
the expectation rests on. The numbers of both are the same by construction."""

from dataclasses import dataclass

from table_contents import (
    RULES,
    SPARSIFY,
    TRAINED_SPEED,
    TYPES,
    ZEN_4,
    ZEN_5,
    in_turns,
    markdown,
    percent,
    result,
    signed,
    times,
)
from table_gpu import DIVIDED, WHOLE, rows_of
from table_speed import chat

PLANTED = (f"decode-{ZEN_5}", f"decode-{ZEN_4}", "decode-intel-xeon-processor-2.50ghz")


@dataclass(frozen=True, kw_only=True)
class Words:
    """The text of the table in one language."""

    header: tuple[str, str, str, str]
    real: str
    synthetic: str
    tiny: str
    between: str
    of_torch: str
    dense: str
    no_loss: str
    larger: str
    skipped: str
    no_faster: str
    cost: str
    trained: str
    of_q8_0: str
    divergence: str
    relu: str
    unknown_loss: str
    bundled: str
    lost_norm: str
    on_gpu: str
    synthetic_7b: str
    in_budget: str


ENGLISH = Words(
    header=("kind of model", "evidence", "decode speed", "loss"),
    real="real: SmolLM2-135M",
    synthetic="synthetic: random weights, 1.1 B",
    tiny="real, but tiny",
    between="{slow} to {fast} llama.cpp",
    of_torch="{ratio} torch alone",
    dense="SiLU chat model, dense, {kind}",
    no_loss="the type's rounding",
    larger="dense, larger, q8_0",
    skipped="SiLU chat model, small gates skipped, untrained",
    no_faster="no faster yet",
    cost="{perplexity} perplexity for {share} fewer bytes",
    trained="the same, trained to be {share} silent",
    of_q8_0="q8_0: {own} its dense mode, {plain} the untrained model",
    divergence="KL {kl} from dense: too much to recommend",
    relu="ReLU model, a tenth of the neurons fire, q8_0",
    unknown_loss="unknown: the weights mean nothing",
    bundled="bundled ReLU model of 7 M parameters",
    lost_norm="{norm} of a layer's output",
    on_gpu="ReLU model, f16, 45 to 80 % of it on an H100",
    synthetic_7b="synthetic: random weights, 7 B",
    in_budget="{range} with a dense twin; dense, all there: {dense}",
)
CHINESE = Words(
    header=("模型种类", "依据", "解码速度", "损失"),
    real="真实：SmolLM2-135M",
    synthetic="合成：随机权重，1.1 B",
    tiny="真实，但极小",
    between="llama.cpp 的 {slow} 至 {fast}",
    of_torch="纯 torch 的 {ratio}",
    dense="SiLU 对话模型，dense，{kind}",
    no_loss="仅该类型的舍入误差",
    larger="dense，更大的模型，q8_0",
    skipped="SiLU 对话模型，未经训练，跳过小的门控值",
    no_faster="目前没有更快",
    cost="少读 {share} 字节时困惑度 {perplexity}",
    trained="同上，训练到 {share} 的神经元静默",
    of_q8_0="q8_0：自身 dense 模式的 {own}，未训练模型的 {plain}",
    divergence="与 dense 的 KL 为 {kl}：损失过大，不推荐",
    relu="ReLU 模型，十分之一的神经元激活，q8_0",
    unknown_loss="未知：权重没有意义",
    bundled="随库附带的 7 M 参数 ReLU 模型",
    lost_norm="一层输出的 {norm}",
    on_gpu="ReLU 模型，f16，45 % 至 80 % 放在 H100 上",
    synthetic_7b="合成：随机权重，7 B",
    in_budget="{range}（它运行 dense 模型）；dense，全部在显卡上：{dense}",
)


def between(words: Words, ratios: list[float]) -> str:
    """The lowest and the highest of the processors' ratios, in words."""
    return words.between.format(slow=times(min(ratios)), fast=times(max(ratios)))


def planted(words: Words, mode: str) -> str:
    return between(
        words, [result(name)["types"]["q8_0"]["2"][mode]["times_rival"] for name in PLANTED]
    )


def chat_decode(words: Words, kind: str) -> str:
    names = (f"chat-model-{ZEN_4}", f"chat-model-{ZEN_5}")
    return between(words, [chat(kind, name)["decode"]["times_rival"] for name in names])


def expected(words: Words) -> str:
    rows = [
        [words.dense.format(kind=kind), words.real, chat_decode(words, kind), words.no_loss]
        for kind in TYPES
    ]
    rows.append([words.larger, words.synthetic, planted(words, "dense"), words.no_loss])
    points = result(RULES)["types"]["f16"]["points"]
    (rule,) = (p for p in points if (p["rule"], p["share"]) == ("gates", 0.08))
    cost = words.cost.format(
        perplexity=signed(rule["perplexity_increase"]), share=percent(rule["share"])
    )
    rows.append([words.skipped, words.real, words.no_faster, cost])
    row = result(SPARSIFY)["rows"][0]["trained"]["held-out.txt"]
    trained = words.trained.format(share=percent(row["silent_share"]))
    divergence = words.divergence.format(kl=f"{row['kl']:.2f}")
    runs = result(TRAINED_SPEED)["speed"]["runs"]
    exact = "trained-60-q8_0 exact"
    own, plain = (in_turns(runs, name, exact) for name in ("trained-60-q8_0 dense", "q8_0 dense"))
    speed = words.of_q8_0.format(own=times(own), plain=times(plain))
    rows.append([trained, words.real, speed, divergence])
    rows.append([words.relu, words.synthetic, planted(words, "predicted"), words.unknown_loss])
    ratio = result("decode-small-intel-xeon-processor-2.50ghz")["predicted"]["times_torch"]
    best = result("predictors-intel-xeon-processor-2.50ghz")["results"]["ours, lost norm 0.02"]
    norm = words.lost_norm.format(norm=percent(best["lost_norm"], 1))
    rows.append([words.bundled, words.tiny, words.of_torch.format(ratio=f"{ratio:.0f}x"), norm])
    ratio_of = {row["mode"]: row["times_rival"] for row in rows_of("7B", WHOLE)}
    found = between(words, [row["times_rival"] for row in rows_of("7B", DIVIDED)])
    speed = words.in_budget.format(range=found, dense=times(ratio_of["dense"]))
    rows.append([words.on_gpu, words.synthetic_7b, speed, words.unknown_loss])
    return markdown(words.header, rows)


TABLES = {"expected": lambda: expected(ENGLISH), "expected zh": lambda: expected(CHINESE)}
