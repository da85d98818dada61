"""Measures perplexity far beyond a model's training context, on the second half of long texts.

    python benchmarks/kv_beyond.py MODEL TEXT [--tokens 16384] [--texts 3] [--first 0]

The baseline stays in the window: it predicts each token from half a context or more of preceding
tokens, at positions that training covered. The others go through the text once, with capped
positions: with only a window and the first tokens (StreamingLLM, Xiao et al. 2023, arXiv
2309.17453; `top` has its minimum, one block), and with keys selected from the whole text. None
reads more positions than the context has. The intervals, over the texts, are 95 % confidence
intervals (Student's t) of the perplexity relative to that of `half a window`."""

import argparse
import json
import math
import statistics
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from machine import machine, processor, slug

from hotsplit import Engine
from hotsplit.files.atomic import partial_file

# Half the width of a 95 % interval in standard errors, by the number of texts.
STUDENT_95 = {3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}


def ways_of(context: int) -> dict[str, str]:
    """Selections whose sinks, window, top and block add up to at most the context."""
    common = "block=16,sinks=16,positions=capped"
    half = f"{common},window={context // 2}"
    return {
        "a window of the context": f"{common},window={context - 48},top=16",
        "three eighths of a window": f"{common},window={context * 3 // 8},top=16",
        "half a window": f"{half},top=16",
        "half a window and 48 more": f"{common},window={context // 2 + 48},top=16",
        "half a window, and keys": f"{half},top=64",
        "half a window, and whole blocks": f"{half},top=64,candidates=0",
        "half a window, and as many keys": f"{half},top={context // 2 - 32}",
    }


def loss_of(logits_TV: torch.Tensor, next_T: torch.Tensor) -> torch.Tensor:
    return -logits_TV.log_softmax(dim=-1).gather(1, next_T[:, None])[:, 0].double()


def in_window(engine: Engine, ids: list[int], context: int) -> torch.Tensor:
    """Losses of the tokens from half a context on, each predicted within a window, up to the end
    of the last whole window."""
    half, losses = context // 2, []
    for start in range(0, len(ids) - context + 1, half):
        logits_TV = engine.logits(ids[start : start + context])[half - 1 : -1]
        losses.append(loss_of(logits_TV, torch.tensor(ids[start + half : start + context])))
    return torch.cat(losses)


def through(engine: Engine, ids: list[int]) -> torch.Tensor:
    """Losses of all tokens of a text except the first."""
    losses = []
    with engine.sequence() as text:
        for start in range(0, len(ids), 512):
            piece = ids[start : start + 512]
            following = torch.tensor(ids[start + 1 : start + 1 + len(piece)])
            logits_TV = text.extend(piece, "all")[: len(following)]
            losses.append(loss_of(logits_TV, following))
    return torch.cat(losses)


def interval_of(loss_N: list[float], base_N: list[float]) -> list[float] | None:
    """The 95 % interval of a ratio of perplexities on the same N texts; None if STUDENT_95 has no
    value for N."""
    difference_N = [loss - base for loss, base in zip(loss_N, base_N, strict=True)]
    count = len(difference_N)
    if count not in STUDENT_95:
        return None
    middle = statistics.mean(difference_N)
    reach = STUDENT_95[count] * statistics.stdev(difference_N) / math.sqrt(count)
    return [math.exp(middle - reach), math.exp(middle + reach)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--texts", type=int, default=3)
    parser.add_argument("--first", type=int, default=0, help="number of the first text")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    half = arguments.tokens // 2
    with Engine.load(arguments.model, mode="dense", device="cpu") as engine:
        context = engine.context_length
        ids = engine.codec.encode(arguments.text.read_text())
        texts = list(torch.tensor(ids).split(arguments.tokens))[arguments.first :]
        texts = texts[: arguments.texts]
        assert len(texts[-1]) == arguments.tokens, f"{arguments.text}: {len(ids)} tokens"
        losses = [
            in_window(engine, text.tolist(), context)[half - context // 2 :] for text in texts
        ]
    by_text = {"in the window": [loss.mean().item() for loss in losses]}
    ways = ways_of(context)
    for name, sizes in ways.items():
        with Engine.load(
            arguments.model, mode="dense", device="cpu", context_length=arguments.tokens,
            kv_offload=sizes,
        ) as engine:  # fmt: skip
            losses = [through(engine, text.tolist())[half - 1 :] for text in texts]
        by_text[name] = [loss.mean().item() for loss in losses]
        print(f"{name:32} {' '.join(f'{loss:.4f}' for loss in by_text[name])}", flush=True)
    means = {name: statistics.mean(found) for name, found in by_text.items()}
    found: dict[str, Any] = {}
    for name, mean in means.items():
        ratio = math.exp(mean - means["in the window"])
        found[name] = {
            "selection": ways.get(name), "perplexity": math.exp(mean), "times": ratio,
            "times_half": math.exp(mean - means["half a window"]),
            "interval": interval_of(by_text[name], by_text["half a window"]),
        }  # fmt: skip
        print(f"{name:32} perplexity {math.exp(mean):.3f}, {ratio:.3f}x")
    result = {
        "benchmark": "kv-beyond", "model": arguments.model.stem, "machine": machine(),
        "time": datetime.now(UTC).isoformat(timespec="seconds"), "context": context,
        "tokens": arguments.tokens, "texts": len(texts),
        "first": arguments.first, "ways": found,
    }  # fmt: skip
    folder = Path(__file__).parent / "results"
    output = arguments.output or folder / f"kv-beyond-{slug(processor())}.json"
    with partial_file(output) as partial:
        partial.write_text(json.dumps(result, indent=1) + "\n")
    print(f"wrote {output}")


if __name__ == "__main__":
    main()
