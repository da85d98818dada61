"""Trains the bundled mixture of experts: a Qwen3-MoE of 7 M parameters that writes Python.

    python train_moe.py -o DIR                # run it again to resume

It begins as tiny-silu, whose neurons are divided among the experts by k-means over the directions
of their gates, with clusters of one size (as in MoEfication, Zhang et al. 2021, arXiv 2110.01786);
the router begins with the clusters' middles. From there all weights are trained: matrices by Muon,
each expert's on its own, the router and the rest by AdamW. The load is balanced by Switch
Transformer's auxiliary loss (arXiv 2101.03961, equations 4 to 6), layer by layer.

Text, tokenizer, batches and the optimizer are tiny-relu's (its train_relu.py); a run is a function
of its settings, the seed and the step. This program does not use hotsplit."""

import argparse
import json
import math
import shutil
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

EXAMPLES = Path(__file__).parent.parent
sys.path.insert(0, str(EXAMPLES / "tiny-relu"))
from bundled_corpus import HELD_OUT, library_texts  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402
from train_relu import Muon, TrainConfig, batch, encode, say  # noqa: E402

DENSE = EXAMPLES / "tiny-silu"
EXPERTS, USED = 16, 4
MODEL = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "num_experts": EXPERTS,
    "num_experts_per_tok": USED,
    "moe_intermediate_size": 64,
    "intermediate_size": 1024,  # of dense layers, of which there are none
    "norm_topk_prob": True,
    "hidden_act": "silu",
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "rms_norm_eps": 1e-5,
}


@dataclass(frozen=True, kw_only=True)
class MoeConfig:
    steps: int = 2000
    tokens_per_batch: int = 4096
    learning_rate: float = 2e-3
    weight_decay: float = 0.1
    warmup_steps: int = 50
    balance_weight: float = 0.01
    seed: int = 0

    @property
    def batches(self) -> TrainConfig:
        return TrainConfig(steps=self.steps, tokens_per_batch=self.tokens_per_batch, seed=self.seed)


def even_clusters(rows_FD: Tensor, count: int) -> Tensor:
    """int64 [count, F / count]: the rows in clusters of one size, by k-means with cosine similarity
    in which the pairs of row and cluster are taken from the most similar down."""
    rows_FD = F.normalize(rows_FD, dim=1)
    size = len(rows_FD) // count
    middles_KD = rows_FD[torch.randperm(len(rows_FD))[:count]]
    for _ in range(20):
        likeness_FK = rows_FD @ middles_KD.T
        cluster_F = torch.full((len(rows_FD),), -1)
        room = [size] * count
        for pair in likeness_FK.flatten().argsort(descending=True).tolist():
            row, cluster = divmod(pair, count)
            if cluster_F[row] < 0 and room[cluster]:
                cluster_F[row] = cluster
                room[cluster] -= 1
        middles_KD = F.normalize(
            torch.stack([rows_FD[cluster_F == k].mean(0) for k in range(count)]), dim=1
        )
    return torch.stack([(cluster_F == k).nonzero()[:, 0] for k in range(count)])


@torch.no_grad()
def upcycled(ids: Tensor) -> Qwen3MoeForCausalLM:
    """The mixture with tiny-silu's weights. Norms of queries and keys begin with the average size
    of the queries and keys of one window of text."""
    dense = LlamaForCausalLM.from_pretrained(DENSE, dtype=torch.float32)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**MODEL))
    sizes: list[float] = []
    for layer in dense.model.layers:
        for linear in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            linear.register_forward_hook(
                lambda module, args, out: sizes.append(out.square().mean().sqrt().item())
            )
    dense(ids[:1024][None])
    model.model.embed_tokens.load_state_dict(dense.model.embed_tokens.state_dict())
    model.model.norm.load_state_dict(dense.model.norm.state_dict())
    for index, (layer, source) in enumerate(
        zip(model.model.layers, dense.model.layers, strict=True)
    ):
        layer.self_attn.load_state_dict(source.self_attn.state_dict(), strict=False)
        layer.self_attn.q_norm.weight.fill_(sizes[2 * index])
        layer.self_attn.k_norm.weight.fill_(sizes[2 * index + 1])
        layer.input_layernorm.load_state_dict(source.input_layernorm.state_dict())
        layer.post_attention_layernorm.load_state_dict(source.post_attention_layernorm.state_dict())
        mlp, gate_FD = source.mlp, source.mlp.gate_proj.weight
        clusters_EI = even_clusters(gate_FD, EXPERTS)
        experts = layer.mlp.experts
        experts.gate_up_proj.copy_(
            torch.cat([gate_FD[clusters_EI], mlp.up_proj.weight[clusters_EI]], dim=1)
        )
        # The weights of the chosen experts sum to 1, as if each had USED times too little.
        experts.down_proj.copy_(USED * mlp.down_proj.weight.T[clusters_EI].mT)
        middles_ED = F.normalize(F.normalize(gate_FD, dim=1)[clusters_EI].mean(1), dim=1)
        layer.mlp.gate.weight.copy_(middles_ED)
    return model


class RouterWatch:
    """Collects the router's logits [tokens, EXPERTS] of every layer in each forward pass."""

    def __init__(self, model: Qwen3MoeForCausalLM) -> None:
        self.logits: list[Tensor] = []
        for layer in model.model.layers:
            layer.mlp.gate.register_forward_hook(
                lambda module, args, out: self.logits.append(out[0])
            )

    def take(self) -> list[Tensor]:
        logits, self.logits = self.logits, []
        return logits


def imbalance(logits_TE: Tensor) -> Tensor:
    """1 if the experts are used evenly, up to EXPERTS / USED if always the same are."""
    shares_E = F.one_hot(logits_TE.topk(USED).indices, EXPERTS).float().sum(1).mean(0) / USED
    return EXPERTS * (shares_E * logits_TE.softmax(1).mean(0)).sum()


def mutual_information(choices_TU: Tensor, ids_T: Tensor) -> float:
    """Bits that a token's id says about one of its experts, from counts."""
    counts_VE = torch.zeros(MODEL["vocab_size"], EXPERTS, dtype=torch.float64)
    for choice_T in choices_TU.T:
        counts_VE.index_put_(
            (ids_T, choice_T), torch.ones((), dtype=torch.float64), accumulate=True
        )
    joint_VE = counts_VE / counts_VE.sum()
    independent_VE = joint_VE.sum(1, keepdim=True) * joint_VE.sum(0, keepdim=True)
    there = joint_VE > 0
    return (joint_VE[there] * (joint_VE[there] / independent_VE[there]).log2()).sum().item()


@torch.no_grad()
def evaluate(
    model: Qwen3MoeForCausalLM, watch: RouterWatch, ids: Tensor, windows: int, length: int
) -> dict:
    """Loss in nats per token, perplexity, and for each layer the experts' shares of the choices,
    the bits that the token's id says about its experts, and the same with ids at random places."""
    model.eval()
    usable = (len(ids) - 1) // length
    loss_sum, choices, seen = 0.0, [], []
    for w in range(0, usable, max(1, usable // windows)):
        window = ids[w * length : (w + 1) * length + 1][None]
        logits = model(window[:, :-1]).logits
        loss_sum += F.cross_entropy(logits[0].float(), window[0, 1:], reduction="sum").item()
        choices.append(torch.stack([one.topk(USED).indices for one in watch.take()]))
        seen.append(window[0, :-1])
    model.train()
    choices_LTU, ids_T = torch.cat(choices, dim=1), torch.cat(seen)
    shuffled_T = ids_T[torch.randperm(len(ids_T), generator=torch.Generator().manual_seed(0))]
    return {
        "loss": loss_sum / len(ids_T),
        "perplexity": math.exp(loss_sum / len(ids_T)),
        "expert_shares": [
            (c.flatten().bincount(minlength=EXPERTS) / c.numel()).tolist() for c in choices_LTU
        ],
        "expert_bits": [mutual_information(c, ids_T) for c in choices_LTU],
        "expert_bits_shuffled": [mutual_information(c, shuffled_T) for c in choices_LTU],
        "tokens": len(ids_T),
        "window": length,
    }


class MoeTraining:
    """A training run: what `resume.pt` holds, and the step that changes it."""

    def __init__(self, out: Path, config: MoeConfig, ids: Tensor) -> None:
        torch.manual_seed(config.seed)
        self.path, self.config, self.step = out / "resume.pt", config, 0
        self.model = upcycled(ids)
        self.model.train()
        self.watch = RouterWatch(self.model)
        matrices = [p for n, p in self.model.named_parameters() if self.is_muon(n, p)]
        others = [p for n, p in self.model.named_parameters() if not self.is_muon(n, p)]
        rate = config.learning_rate
        self.optimizers: list[torch.optim.Optimizer] = [
            Muon(matrices, rate, config.weight_decay),
            torch.optim.AdamW(others, rate, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        if self.path.exists():
            saved = torch.load(self.path, weights_only=True)
            self.model.load_state_dict(saved["model"])
            self.step = saved["step"]
            for optimizer, state in zip(self.optimizers, saved["optimizers"], strict=True):
                optimizer.load_state_dict(state)

    @staticmethod
    def is_muon(name: str, parameter: nn.Parameter) -> bool:
        return parameter.dim() >= 2 and "embed" not in name and "mlp.gate." not in name

    def save(self) -> None:
        partial = self.path.with_suffix(".partial")
        optimizers = [optimizer.state_dict() for optimizer in self.optimizers]
        torch.save(
            {"model": self.model.state_dict(), "optimizers": optimizers, "step": self.step}, partial
        )
        partial.replace(self.path)

    def advance(self, ids: Tensor, *, use_bf16: bool) -> tuple[float, float]:
        """One step; returns the loss and the mean imbalance of its batch."""
        warm = min(1.0, (self.step + 1) / self.config.warmup_steps)
        rate = self.config.learning_rate * warm * (1 - self.step / self.config.steps)
        window = batch(ids, self.config.batches, self.step)
        with torch.autocast("cpu", torch.bfloat16, enabled=use_bf16):
            logits = self.model(window[:, :-1]).logits
        loss = F.cross_entropy(logits.flatten(0, 1).float(), window[:, 1:].flatten())
        uneven = torch.stack([imbalance(one.float()) for one in self.watch.take()]).mean()
        (loss + self.config.balance_weight * uneven).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return loss.item(), uneven.item()


def train(out: Path, config: MoeConfig, *, use_bf16: bool) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(DENSE / name, out)
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    texts, held_out_texts = library_texts("train"), library_texts("held-out")
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(config.seed))
    ids = encode(tokenizer, [texts[i] for i in order.tolist()])
    held_out = encode(tokenizer, held_out_texts)
    run = MoeTraining(out, config, ids)
    began, first = time.perf_counter(), run.step
    while run.step < config.steps:
        loss, uneven = run.advance(ids, use_bf16=use_bf16)
        if run.step % 10 == 0:
            pace = (time.perf_counter() - began) / (run.step - first)
            say(
                f"step {run.step}/{config.steps}  loss {loss:.3f}  imbalance {uneven:.3f}"
                f"  {pace:.2f} s/step  {pace * (config.steps - run.step) / 60:.0f} min left"
            )
        if run.step % 100 == 0:
            seen = evaluate(run.model, run.watch, held_out, 48, 512)
            bits = sum(seen["expert_bits"]) / len(seen["expert_bits"])
            say(f"  held out: perplexity {seen['perplexity']:.2f}, bits per expert {bits:.2f}")
            run.save()
    finish(out, run, held_out, sum(len(t.encode()) for t in held_out_texts), len(ids))


def finish(
    out: Path, run: MoeTraining, held_out: Tensor, num_bytes: int, training_tokens: int
) -> None:
    """Writes the checkpoint in bf16, and measurements of it as written."""
    run.model.to(torch.bfloat16).save_pretrained(out)
    report = evaluate(run.model.float(), run.watch, held_out, len(held_out), 1024)
    report["bits_per_byte"] = report["loss"] * len(held_out) / num_bytes / math.log(2)
    report |= {
        "parameters": sum(p.numel() for p in run.model.parameters()),
        "training_tokens": training_tokens,
        "held_out_modules": sorted(HELD_OUT),
        "python": sys.version.split()[0],
        "settings": asdict(run.config),
    }
    (out / "metrics.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, required=True)
    for name in ("steps", "seed"):
        parser.add_argument(f"--{name}", type=int, default=getattr(MoeConfig, name))
    for name in ("learning-rate", "balance-weight"):
        default = getattr(MoeConfig, name.replace("-", "_"))
        parser.add_argument(f"--{name}", type=float, default=default)
    parser.add_argument(
        "--bf16", action="store_true", help="autocast; fast where the processor has AMX"
    )
    args = vars(parser.parse_args())
    out, use_bf16 = args.pop("output"), args.pop("bf16")
    train(out, MoeConfig(**args), use_bf16=use_bf16)


if __name__ == "__main__":
    main()
