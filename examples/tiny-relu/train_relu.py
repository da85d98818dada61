"""Trains the bundled model: a ReLU-gated Llama of 7 M parameters that writes Python.

    python train_relu.py -o DIR                # from scratch; run it again to resume
    python train_relu.py -o DIR --steps 20     # a quick look

The commands that made the bundled checkpoint are listed in its model card, README.md.

Real weights matter here because random ones have no hot neurons. Sparsity comes from the L1 term on
the gate activations (as in ProSparse, arXiv 2402.13516, stage 2), which ramps up after the model
has learned something; skew comes from weighting that term by a neuron's rank: the busiest of a
layer pays nothing, the quietest twice the mean (in the spirit of reweighted L1, Candes et al.
2008). Hidden matrices are trained by Muon (Jordan et al. 2024), the gates and the rest by AdamW:
Muon's orthogonal updates make all neurons equally busy. Training windows are 512 tokens, and 1,024
for the last part of the run, so that every position of the context has been seen.

A run is a function of its settings, the seed and the step: batches are drawn from the last two, so
an interrupted run that resumes sees what it would have seen. Settings may change at a resume; their
history is kept and written to metrics.json. This program does not use hotsplit."""

import argparse
import json
import math
import shutil
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from bundled_corpus import HELD_OUT, library_texts
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

END = "<|endoftext|>"


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    steps: int = 1700
    tokens_per_batch: int = 4096
    learning_rate: float = 3e-3
    weight_decay: float = 0.1
    warmup_steps: int = 50
    long_context_share: float = 0.15
    l1_weight: float = 0.45
    l1_by_rank: bool = True
    muon_gates: bool = False
    activation: str = "relu"
    start_from: str | None = None  # folder of a checkpoint to start from
    l1_start: float = 0.10  # shares of the run between which the L1 term ramps up
    l1_full: float = 0.60
    seed: int = 0


MODEL = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
    "hidden_act": "relu",
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
    "rms_norm_eps": 1e-5,
}


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE with GPT-2's pre-tokenizer, which llama.cpp knows as "gpt-2"."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> Tensor:
    """int64 [tokens]: every text after one END token."""
    end = tokenizer.token_to_id(END)
    pieces = [np.array([end, *e.ids], dtype=np.int64) for e in tokenizer.encode_batch(texts)]
    return torch.from_numpy(np.concatenate(pieces))


def batch(ids: Tensor, config: TrainConfig, step: int) -> Tensor:
    """int64 [windows, length + 1]; the places are drawn from (seed, step) alone, `length` is
    512, or 1,024 in the last part of the run."""
    is_long = step >= (1 - config.long_context_share) * config.steps
    length = 1024 if is_long else 512
    generator = torch.Generator().manual_seed(config.seed * 1_000_003 + step)
    starts = torch.randint(
        len(ids) - length - 1, (config.tokens_per_batch // length,), generator=generator
    )
    return torch.stack([ids[s : s + length + 1] for s in starts.tolist()])


class Muon(torch.optim.Optimizer):
    """Momentum whose update is orthogonalised by Newton-Schulz in f32.

    torch.optim.Muon does the same in bf16, which processors without bf16 units emulate."""

    def __init__(self, params: list[nn.Parameter], lr: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": 0.95})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(p)
                momentum = state["momentum"].lerp_(p.grad, 1 - group["momentum"])
                update = orthogonal(p.grad.lerp(momentum, group["momentum"]))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update, alpha=-group["lr"] * 0.2 * math.sqrt(max(p.shape[-2:])))


def orthogonal(g: Tensor) -> Tensor:
    """Approximately U V^T of each matrix g = U S V^T [..., m, n], by five steps of Muon's quintic
    iteration."""
    is_tall = g.shape[-2] > g.shape[-1]
    x = g.mT if is_tall else g
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * (a @ a)) @ x
    return x.mT if is_tall else x


class GateWatch:
    """Collects the activated gates of every layer in each forward pass."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        self.gates: list[Tensor] = []
        for layer in model.model.layers:
            layer.mlp.act_fn.register_forward_hook(lambda module, args, out: self.gates.append(out))

    def take(self) -> list[Tensor]:
        gates, self.gates = self.gates, []
        return gates


def rank_weights(mean_F: Tensor) -> Tensor:
    """L1 weight of each neuron, 0 for the busiest to 2 for the quietest; mean 1."""
    rank = mean_F.argsort(descending=True).argsort()
    return rank * (2 / (len(rank) - 1))


def schedule(config: TrainConfig, step: int, fresh_from: int) -> tuple[float, float]:
    """(learning rate, L1 weight) of a step; `fresh_from` is where the optimizers began."""
    warm = min(1.0, (step - fresh_from + 1) / config.warmup_steps)
    left = 1 - step / config.steps
    ramp = (step / config.steps - config.l1_start) / (config.l1_full - config.l1_start)
    rate = config.learning_rate * warm * left
    return rate, config.l1_weight * min(1.0, max(0.0, ramp))


@torch.no_grad()
def evaluate(
    model: LlamaForCausalLM, watch: GateWatch, ids: Tensor, windows: int, length: int
) -> dict:
    """Loss in nats per token, perplexity, and for each layer the density and the share of firings
    taken by the hottest fifth of neurons, over at most `windows` windows of `length` tokens."""
    model.eval()
    usable = (len(ids) - 1) // length
    loss_sum, num_tokens, counts = 0.0, 0, None
    for w in np.unique(np.linspace(0, usable - 1, min(windows, usable)).astype(int)).tolist():
        window = ids[w * length : (w + 1) * length + 1][None]
        logits = model(window[:, :-1]).logits
        loss_sum += F.cross_entropy(logits[0].float(), window[0, 1:], reduction="sum").item()
        fired = torch.stack([(g > 0).sum((0, 1)) for g in watch.take()])
        counts = fired if counts is None else counts + fired
        num_tokens += length
    model.train()
    assert counts is not None
    hottest = counts.sort(dim=1, descending=True).values[:, : counts.shape[1] // 5].sum(1)
    return {
        "loss": loss_sum / num_tokens,
        "perplexity": math.exp(loss_sum / num_tokens),
        "density": (counts / num_tokens).mean(1).tolist(),
        "hottest_fifth": (hottest / counts.sum(1)).tolist(),
        "tokens": num_tokens,
        "window": length,
    }


def prepare(out: Path, config: TrainConfig) -> tuple[Tensor, Tensor, int]:
    """Training ids, held-out ids, held-out bytes; the tokenizer is kept in `out`."""
    texts, held_out = library_texts("train"), library_texts("held-out")
    path = out / "tokenizer.json"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if config.start_from is not None:
            shutil.copy(Path(config.start_from) / name, out)
    if path.exists():
        tokenizer = Tokenizer.from_file(str(path))
    else:
        tokenizer = train_tokenizer(texts, MODEL["vocab_size"])  # type: ignore[arg-type]
        wrapped = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, bos_token=END, eos_token=END, model_max_length=1024
        )
        wrapped.save_pretrained(out)
    order = np.random.default_rng(config.seed).permutation(len(texts))
    ids = encode(tokenizer, [texts[i] for i in order])
    return ids, encode(tokenizer, held_out), sum(len(t.encode()) for t in held_out)


def optimizers(model: nn.Module, config: TrainConfig) -> list[torch.optim.Optimizer]:
    def is_muon(name: str, parameter: nn.Parameter) -> bool:
        is_gate = "gate_proj" in name
        return parameter.dim() == 2 and "embed" not in name and (config.muon_gates or not is_gate)

    matrices = [p for n, p in model.named_parameters() if is_muon(n, p)]
    others = [p for n, p in model.named_parameters() if not is_muon(n, p)]
    return [
        Muon(matrices, config.learning_rate, config.weight_decay),
        torch.optim.AdamW(others, config.learning_rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


class Training:
    """A training run: what `resume.pt` holds, and the step that changes it."""

    def __init__(self, out: Path, config: TrainConfig) -> None:
        torch.manual_seed(config.seed)
        self.path, self.config = out / "resume.pt", config
        shape = LlamaConfig(**{**MODEL, "hidden_act": config.activation})
        self.model = (
            LlamaForCausalLM(shape)
            if config.start_from is None
            else LlamaForCausalLM.from_pretrained(
                config.start_from, config=shape, dtype=torch.float32
            )
        )
        self.watch, self.optimizers = GateWatch(self.model), optimizers(self.model, config)
        self.step, self.fresh_from = 0, 0  # `fresh_from`: the step at which the optimizers began
        self.history: list[dict] = []
        if self.path.exists():
            self.load()
        if not self.history or self.history[-1]["settings"] != asdict(config):
            self.history.append({"from_step": self.step, "settings": asdict(config)})
        self.forward = torch.compile(self.losses, dynamic=False)

    def load(self) -> None:
        saved = torch.load(self.path, weights_only=True)
        self.model.load_state_dict(saved["model"])
        self.step, self.history = saved["step"], saved["history"]
        self.fresh_from = saved["fresh_from"]
        if self.history[-1]["settings"]["muon_gates"] == self.config.muon_gates:
            for optimizer, state in zip(self.optimizers, saved["optimizers"], strict=True):
                optimizer.load_state_dict(state)
        else:
            self.fresh_from = self.step

    def save(self) -> None:
        partial = self.path.with_suffix(".partial")
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "step": self.step,
            "history": self.history,
            "fresh_from": self.fresh_from,
        }
        torch.save(state, partial)
        partial.replace(self.path)

    def losses(self, window: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Loss, (weighted) mean gate activation and density of windows [windows, length + 1]."""
        logits = self.model(window[:, :-1]).logits
        loss = F.cross_entropy(logits.flatten(0, 1).float(), window[:, 1:].flatten())
        gates = self.watch.take()
        mean_LF = torch.stack([g.float().mean((0, 1)) for g in gates])
        if self.config.l1_by_rank:
            mean_LF = mean_LF * torch.stack([rank_weights(m.detach()) for m in mean_LF])
        density = torch.stack([(g > 0).float().mean() for g in gates]).mean()
        return loss, mean_LF.mean(), density

    def advance(self, ids: Tensor, use_bf16: bool) -> tuple[float, float]:
        """One step; returns loss and density of its batch."""
        rate, l1_weight = schedule(self.config, self.step, self.fresh_from)
        window = batch(ids, self.config, self.step)
        with torch.autocast("cpu", torch.bfloat16, enabled=use_bf16):
            loss, activation, density = self.forward(window)
        (loss + l1_weight * activation).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return loss.item(), density.item()


def train(out: Path, config: TrainConfig, *, use_bf16: bool, stop_at: int | None) -> None:
    out.mkdir(parents=True, exist_ok=True)
    ids, held_out, held_out_bytes = prepare(out, config)
    say(f"{len(ids):,} training tokens, {len(held_out):,} held out")
    run = Training(out, config)
    began, first, end = time.perf_counter(), run.step, min(config.steps, stop_at or config.steps)
    while run.step < end:
        loss, density = run.advance(ids, use_bf16)
        if run.step % 10 == 0:
            pace = (time.perf_counter() - began) / (run.step - first)
            say(
                f"step {run.step}/{config.steps}  loss {loss:.3f}  density {density:.3f}"
                f"  {pace:.2f} s/step  {pace * (end - run.step) / 60:.0f} min left"
            )
        if run.step % 100 == 0 or run.step == end:
            seen = evaluate(run.model, run.watch, held_out, 48, 512)
            say(
                f"  held out: perplexity {seen['perplexity']:.2f},"
                f" density {np.mean(seen['density']):.3f},"
                f" hottest fifth {np.mean(seen['hottest_fifth']):.3f}"
            )
            run.save()
    if run.step == config.steps:
        finish(out, run, held_out, held_out_bytes, len(ids))


def finish(
    out: Path, run: Training, held_out: Tensor, held_out_bytes: int, training_tokens: int
) -> None:
    """Writes the checkpoint in bf16, and measurements of it as written."""
    run.model.to(torch.bfloat16).save_pretrained(out)
    length = run.model.config.max_position_embeddings
    report = evaluate(run.model.float(), run.watch, held_out, len(held_out), length)
    report["bits_per_byte"] = report["loss"] * len(held_out) / held_out_bytes / math.log(2)
    report |= {
        "parameters": sum(p.numel() for p in run.model.parameters()),
        "training_tokens": training_tokens,
        "held_out_modules": sorted(HELD_OUT),
        "python": sys.version.split()[0],
        "history": run.history,
    }
    (out / "metrics.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report))


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=TrainConfig.steps)
    parser.add_argument("--l1-weight", type=float, default=TrainConfig.l1_weight)
    parser.add_argument("--l1-by-rank", type=int, choices=[0, 1], default=1)
    parser.add_argument("--muon-gates", type=int, choices=[0, 1], default=0)
    parser.add_argument("--l1-full", type=float, default=TrainConfig.l1_full)
    parser.add_argument("--learning-rate", type=float, default=TrainConfig.learning_rate)
    parser.add_argument("--activation", choices=["relu", "silu"], default=TrainConfig.activation)
    parser.add_argument("--start-from", help="folder of a checkpoint to begin with")
    parser.add_argument("--stop-at", type=int, help="stop after this step; resume later")
    parser.add_argument("--seed", type=int, default=TrainConfig.seed)
    parser.add_argument(
        "--bf16", action="store_true", help="autocast; fast where the processor has AMX"
    )
    args = parser.parse_args()
    config = TrainConfig(
        steps=args.steps,
        seed=args.seed,
        l1_weight=args.l1_weight,
        l1_full=args.l1_full,
        l1_by_rank=bool(args.l1_by_rank),
        muon_gates=bool(args.muon_gates),
        learning_rate=args.learning_rate,
        activation=args.activation,
        start_from=args.start_from,
    )
    train(args.output, config, use_bf16=args.bf16, stop_at=args.stop_at)


if __name__ == "__main__":
    main()
