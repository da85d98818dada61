"""Trains the bundled mixture of experts: a Qwen3.5-MoE of 7 M parameters with a draft block, which
writes Python.

    python train_moe.py -o DIR                # run it again to resume

It begins as tiny-silu with the first 1,024 of its tokens. Every other layer has a gated delta net
in place of attention, which begins with nothing to add. A layer's neurons are divided by k-means
over the directions of their gates, with clusters of one size (as in MoEfication, Zhang et al. 2021,
arXiv 2110.01786): the first clusters are the experts, whose middles the router begins with, the
others are the shared expert. From there all weights are trained: matrices by Muon, each expert's on
its own, the router and the rest by AdamW. The load is balanced by Switch Transformer's auxiliary
loss (arXiv 2101.03961, equations 4 to 6), layer by layer.

The block is trained with the model (as in DeepSeek-V3, arXiv 2412.19437), towards the model's own
probabilities, and on chains of guesses (FastMTP, arXiv 2509.18362): the second and third of a chain
read the block's own hidden states, and see the entries that they see when drafting. At last it is
trained alone, on greedy texts of the model.

Text, batches and the optimizer are tiny-relu's (its train_relu.py); a run is a function of its
settings, the seed and the step. This program does not use hotsplit."""

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
from transformers import LlamaForCausalLM, Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import (
    Qwen3_5MoeDecoderLayer,
    Qwen3_5MoeRMSNorm,
)

EXAMPLES = Path(__file__).parent.parent
sys.path.insert(0, str(EXAMPLES / "tiny-relu"))
from bundled_corpus import HELD_OUT, library_texts  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402
from train_relu import Muon, TrainConfig, batch, encode, say  # noqa: E402

DENSE = EXAMPLES / "tiny-silu"
EXPERTS, USED, WIDTH, SHARED = 16, 4, 32, 384
CHAIN = 3  # guesses in a row that the block is trained for
VOCABULARY = 1024
MODEL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "layer_types": ["linear_attention", "full_attention"] * 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "num_experts": EXPERTS,
    "num_experts_per_tok": USED,
    "moe_intermediate_size": WIDTH,
    "shared_expert_intermediate_size": SHARED,
    "hidden_act": "silu",
    "max_position_embeddings": 1024,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 1.0,
        "mrope_section": [6, 5, 5],
    },
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "rms_norm_eps": 1e-5,
}


@dataclass(frozen=True, kw_only=True)
class MoeConfig:
    steps: int = 300
    block_steps: int = 192  # of the block alone
    tokens_per_batch: int = 2048
    learning_rate: float = 2e-3
    weight_decay: float = 0.1
    warmup_steps: int = 50
    balance_weight: float = 0.01
    block_weight: float = 0.3  # of the loss of the block's guesses
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


class DraftBlock(nn.Module):
    """The draft block, under the names of Qwen's checkpoints."""

    def __init__(self, config: Qwen3_5MoeTextConfig) -> None:
        super().__init__()
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden, self.norm = (
            Qwen3_5MoeRMSNorm(config.hidden_size, eps=config.rms_norm_eps) for _ in range(3)
        )
        attends = config.layer_types.index("full_attention")
        self.layers = nn.ModuleList([Qwen3_5MoeDecoderLayer(config, attends)])

    def chain(
        self, embedded: Tensor, hidden: Tensor, rotary: tuple[Tensor, Tensor]
    ) -> list[Tensor]:
        """The block's hidden states of the first, second and third guess of a chain. Position p of
        `embedded` is the token after that of `hidden` [windows, T, D]; position p of the result
        guesses the token after that. Guess k reads the states of guess k - 1 one position before,
        and sees entries of first guesses up to those that began its chain, and of its chain."""
        kept, found = KeptKeys(), []
        between = torch.arange(embedded.shape[1])[:, None] - torch.arange(embedded.shape[1])
        for depth in range(CHAIN):
            seen = [between >= depth, *(between == depth - k for k in range(1, depth + 1))]
            joined = [self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)]
            hidden = self.layers[0](
                self.fc(torch.cat(joined, dim=-1)),
                position_embeddings=rotary,
                attention_mask=torch.cat(seen, dim=1)[None, None],
                past_key_values=kept,
            )
            found.append(self.norm(hidden))
            hidden = F.pad(found[-1][:, :-1], (0, 0, 1, 0))
        return found


class KeptKeys:
    """Keys and values of earlier guesses of a chain, in the place of a cache."""

    def __init__(self) -> None:
        self.kept: tuple[Tensor, Tensor] | None = None

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        if self.kept is not None:
            keys = torch.cat([self.kept[0], keys], dim=2)
            values = torch.cat([self.kept[1], values], dim=2)
        self.kept = keys, values
        return keys, values


@torch.no_grad()
def upcycled(ids: Tensor) -> Qwen3_5MoeForCausalLM:
    """The mixture with tiny-silu's weights, and the block with those of its last layer. Norms of
    queries and keys begin with the average size of the queries and keys of one window of text."""
    dense = LlamaForCausalLM.from_pretrained(DENSE, dtype=torch.float32)
    config = Qwen3_5MoeTextConfig(**MODEL)
    model = Qwen3_5MoeForCausalLM(config)
    model.mtp = DraftBlock(config)
    model.mtp.apply(model._init_weights)
    sizes: list[float] = []
    for layer in dense.model.layers:
        for linear in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            linear.register_forward_hook(
                lambda module, args, out: sizes.append(out.square().mean().sqrt().item())
            )
    dense(ids[:1024][None])
    model.model.embed_tokens.weight.copy_(dense.model.embed_tokens.weight[:VOCABULARY])
    model.model.norm.weight.copy_(dense.model.norm.weight - 1)
    model.mtp.norm.weight.copy_(dense.model.norm.weight - 1)
    identity = torch.eye(config.hidden_size)
    model.mtp.fc.weight.copy_(torch.cat([identity, identity], dim=1) / 2)
    sources = [*dense.model.layers, dense.model.layers[-1]]
    targets = [*model.model.layers, model.mtp.layers[0]]
    for index, (layer, source) in enumerate(zip(targets, sources, strict=True)):
        if layer.block_type == "full_attention":
            begin_attention(layer.self_attn, source.self_attn, sizes[2 * index :][:2] or sizes[-2:])
        else:
            layer.linear_attn.out_proj.weight.zero_()
        layer.input_layernorm.weight.copy_(source.input_layernorm.weight - 1)
        layer.post_attention_layernorm.weight.copy_(source.post_attention_layernorm.weight - 1)
        begin_mixture(layer.mlp, source.mlp)
    return model


def begin_attention(attention: nn.Module, source: nn.Module, sizes: list[float]) -> None:
    """Gates begin half open."""
    query_HdD = source.q_proj.weight.view(-1, attention.head_dim, MODEL["hidden_size"])
    gated = torch.cat([query_HdD, torch.zeros_like(query_HdD)], dim=1)
    attention.q_proj.weight.copy_(gated.flatten(0, 1))
    attention.k_proj.weight.copy_(source.k_proj.weight)
    attention.v_proj.weight.copy_(source.v_proj.weight)
    attention.o_proj.weight.copy_(2 * source.o_proj.weight)
    attention.q_norm.weight.fill_(sizes[0] - 1)
    attention.k_norm.weight.fill_(sizes[1] - 1)


def begin_mixture(mixture: nn.Module, source: nn.Module) -> None:
    gate_FD, up_FD, down_FD = (
        linear.weight for linear in (source.gate_proj, source.up_proj, source.down_proj)
    )
    down_FD = down_FD.T
    clusters_KW = even_clusters(gate_FD, len(gate_FD) // WIDTH)
    of_experts_EW, of_shared_S = clusters_KW[:EXPERTS], clusters_KW[EXPERTS:].flatten()[:SHARED]
    joined = torch.cat([gate_FD[of_experts_EW], up_FD[of_experts_EW]], dim=1)
    mixture.experts.gate_up_proj.copy_(joined)
    # The weights of the chosen experts sum to 1, as if each had USED times too little.
    mixture.experts.down_proj.copy_(USED * down_FD[of_experts_EW].mT)
    middles_ED = F.normalize(F.normalize(gate_FD, dim=1)[of_experts_EW].mean(1), dim=1)
    mixture.gate.weight.copy_(middles_ED)
    mixture.shared_expert.gate_proj.weight.copy_(gate_FD[of_shared_S])
    mixture.shared_expert.up_proj.weight.copy_(up_FD[of_shared_S])
    mixture.shared_expert.down_proj.weight.copy_(2 * down_FD[of_shared_S].T)
    mixture.shared_expert_gate.weight.zero_()  # half open


def predictions(
    model: Qwen3_5MoeForCausalLM, window: Tensor, *, has_fixed_trunk: bool = False
) -> tuple[Tensor, list[Tensor]]:
    """Logits [windows, T, V] of the tokens after each of `window` [windows, T + 1] but the last,
    and those of the block's guesses [windows, T - 1, V] from the second on."""
    with torch.set_grad_enabled(torch.is_grad_enabled() and not has_fixed_trunk):
        hidden = model.model(window[:, :-1], use_cache=False).last_hidden_state
        embedded = model.model.embed_tokens(window[:, 1:-1])
    rotary = model.model.rotary_emb(embedded, torch.arange(embedded.shape[1])[None])
    guesses = model.mtp.chain(embedded, hidden[:, :-1], rotary)
    return model.lm_head(hidden), [model.lm_head(guess) for guess in guesses]


class RouterWatch:
    """Collects the router's logits [tokens, EXPERTS] of every layer in each forward pass."""

    def __init__(self, model: Qwen3_5MoeForCausalLM) -> None:
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
    model: Qwen3_5MoeForCausalLM, watch: RouterWatch, ids: Tensor, windows: int, length: int
) -> dict:
    """Loss in nats per token, perplexity, and for each layer the experts' shares of the choices,
    the bits that the token's id says about its experts, and the same with ids at random places; and
    how often the block's first, second and third guess is the model's most probable token, if the
    guesses before were the text's."""
    model.eval()
    usable = (len(ids) - 1) // length
    loss_sum, choices, seen, agreed = 0.0, [], [], []
    for w in range(0, usable, max(1, usable // windows)):
        window = ids[w * length : (w + 1) * length + 1][None]
        logits, guesses = predictions(model, window)
        loss_sum += F.cross_entropy(logits[0].float(), window[0, 1:], reduction="sum").item()
        choices.append(torch.stack([one.topk(USED).indices for one in watch.take()]))
        own_T = logits[0, 1:].argmax(-1)
        agreed.append(
            [(g[0].argmax(-1) == own_T)[k:].float().mean().item() for k, g in enumerate(guesses)]
        )
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
        "agreement": torch.tensor(agreed).mean(0).tolist(),
        "expert_bits_shuffled": [mutual_information(c, shuffled_T) for c in choices_LTU],
        "tokens": len(ids_T),
        "window": length,
    }


def optimizers(model: nn.Module, config: MoeConfig) -> list[torch.optim.Optimizer]:
    not_muon = ("embed", "mlp.gate.", "shared_expert_gate", "conv1d", "in_proj_a", "in_proj_b")

    def is_muon(name: str, parameter: nn.Parameter) -> bool:
        return parameter.dim() >= 2 and not any(other in name for other in not_muon)

    matrices = [p for n, p in model.named_parameters() if is_muon(n, p)]
    others = [p for n, p in model.named_parameters() if not is_muon(n, p)]
    rate = config.learning_rate
    return [
        Muon(matrices, rate, config.weight_decay),
        torch.optim.AdamW(others, rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def updated(model: nn.Module, each: list[torch.optim.Optimizer], rate: float) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in each:
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def block_loss(logits: Tensor, guesses: list[Tensor]) -> Tensor:
    """The mean cross entropy of guesses with the model's own probabilities."""
    own = logits[:, 1:].detach().float().softmax(-1)
    losses = [
        F.cross_entropy(guess[:, k:].flatten(0, 1).float(), own[:, k:].flatten(0, 1))
        for k, guess in enumerate(guesses)
    ]
    return torch.stack(losses).mean()


class MoeTraining:
    """A training run: what `resume.pt` holds, and the step that changes it."""

    def __init__(self, out: Path, config: MoeConfig, ids: Tensor) -> None:
        torch.manual_seed(config.seed)
        self.path, self.config, self.step = out / "resume.pt", config, 0
        self.model = upcycled(ids)
        self.model.train()
        self.watch = RouterWatch(self.model)
        self.optimizers = optimizers(self.model, config)
        if self.path.exists():
            saved = torch.load(self.path, weights_only=True)
            self.model.load_state_dict(saved["model"])
            self.step = saved["step"]
            for optimizer, state in zip(self.optimizers, saved["optimizers"], strict=True):
                optimizer.load_state_dict(state)

    def save(self) -> None:
        partial = self.path.with_suffix(".partial")
        optimizers = [optimizer.state_dict() for optimizer in self.optimizers]
        torch.save(
            {"model": self.model.state_dict(), "optimizers": optimizers, "step": self.step}, partial
        )
        partial.replace(self.path)

    def advance(self, ids: Tensor, *, use_bf16: bool) -> tuple[float, float, float]:
        """One step; returns the model's and the block's loss and the mean imbalance."""
        warm = min(1.0, (self.step + 1) / self.config.warmup_steps)
        rate = self.config.learning_rate * warm * (1 - self.step / self.config.steps)
        window = batch(ids, self.config.batches, self.step)
        with torch.autocast("cpu", torch.bfloat16, enabled=use_bf16):
            logits, guesses = predictions(self.model, window)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), window[:, 1:].flatten())
        of_block = block_loss(logits, guesses)
        uneven = torch.stack([imbalance(one.float()) for one in self.watch.take()]).mean()
        weighted = self.config.block_weight * of_block
        (loss + weighted + self.config.balance_weight * uneven).backward()
        updated(self.model, self.optimizers, rate)
        self.step += 1
        return loss.item(), of_block.item(), uneven.item()


def first_tokens(path: Path) -> Tokenizer:
    """tiny-silu's tokenizer with its first tokens only, written to `path`."""
    saved = json.loads((DENSE / "tokenizer.json").read_text())
    known = {token: id for token, id in saved["model"]["vocab"].items() if id < VOCABULARY}
    merges = [pair for pair in saved["model"]["merges"] if "".join(pair) in known]
    saved["model"] |= {"vocab": known, "merges": merges}
    path.write_text(json.dumps(saved, ensure_ascii=False, indent=2))
    return Tokenizer.from_file(str(path))


def train(out: Path, config: MoeConfig, *, use_bf16: bool) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer_config.json", "generation_config.json"):
        shutil.copy(DENSE / name, out)
    tokenizer = first_tokens(out / "tokenizer.json")
    texts, held_out_texts = library_texts("train"), library_texts("held-out")
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(config.seed))
    ids = encode(tokenizer, [texts[i] for i in order.tolist()])
    held_out = encode(tokenizer, held_out_texts)
    run = MoeTraining(out, config, ids)
    began, first = time.perf_counter(), run.step
    while run.step < config.steps:
        loss, of_block, uneven = run.advance(ids, use_bf16=use_bf16)
        if run.step % 10 == 0:
            pace = (time.perf_counter() - began) / (run.step - first)
            say(
                f"step {run.step}/{config.steps}  loss {loss:.3f}  block {of_block:.3f}"
                f"  imbalance {uneven:.3f}"
                f"  {pace:.2f} s/step  {pace * (config.steps - run.step) / 60:.0f} min left"
            )
        if run.step % 50 == 0:
            seen = evaluate(run.model, run.watch, held_out, 12, 512)
            bits = sum(seen["expert_bits"]) / len(seen["expert_bits"])
            say(
                f"  held out: perplexity {seen['perplexity']:.2f}, bits per expert {bits:.2f},"
                f" block {[round(share, 3) for share in seen['agreement']]}"
            )
            run.save()
    distil(run, ids, use_bf16=use_bf16)
    finish(out, run, held_out, sum(len(t.encode()) for t in held_out_texts), len(ids))


def distil(run: MoeTraining, ids: Tensor, *, use_bf16: bool) -> None:
    """Trains the block alone, on the model's own greedy texts, whose tokens it will guess."""
    model, config = run.model, run.config
    each = optimizers(model.mtp, config)
    draw, own = torch.Generator().manual_seed(config.seed), Tensor()
    for step in range(config.block_steps):
        if step % 96 == 0:  # 256 texts, of which a step takes 8
            model.eval()
            starts = torch.randint(len(ids) - 64, (256,), generator=draw)
            prompts = torch.stack([ids[s : s + 64] for s in starts.tolist()])
            own = model.generate(
                prompts, max_new_tokens=193, do_sample=False, eos_token_id=None, pad_token_id=0
            )
            model.train()
        window = own[torch.randperm(len(own), generator=draw)[:8]]
        with torch.autocast("cpu", torch.bfloat16, enabled=use_bf16):
            logits, guesses = predictions(model, window, has_fixed_trunk=True)
        loss = block_loss(logits, guesses)
        loss.backward()
        updated(model.mtp, each, config.learning_rate / 2 * (1 - step / config.block_steps))
        run.watch.take()
        if step % 16 == 15:
            say(f"block {step + 1}/{config.block_steps}  loss {loss.item():.3f}")


def finish(
    out: Path, run: MoeTraining, held_out: Tensor, num_bytes: int, training_tokens: int
) -> None:
    """Writes the checkpoint in bf16, and measurements of it as written."""
    run.model.to(torch.bfloat16).save_pretrained(out)
    report = evaluate(run.model.float(), run.watch, held_out, 48, 1024)
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
    for name in ("steps", "block-steps", "seed"):
        default = getattr(MoeConfig, name.replace("-", "_"))
        parser.add_argument(f"--{name}", type=int, default=default)
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
