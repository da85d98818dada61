"""The engine: a loaded model that produces logits and tokens.

    from hotsplit import Engine
    with Engine.load("m.gguf", split="m.split.gguf") as engine:
        for token in engine.generate("def main():", max_tokens=64, temperature=0.0):
            print(token.text, end="")

runtime.loading loads it, runtime.step computes the forward pass."""

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields, replace
from functools import cached_property
from pathlib import Path
from typing import Self, Unpack

import torch
from torch import Tensor

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.artifacts.split_file import Split
from hotsplit.errors import HotsplitError
from hotsplit.files.typed import shown
from hotsplit.options.cache_types import CacheTypes
from hotsplit.options.engine_config import EngineConfig, EngineOptions
from hotsplit.options.generation_options import SamplingOptions
from hotsplit.options.kinds import check_kind, kinds_checked
from hotsplit.options.model_sampling import sampling_of
from hotsplit.runtime.device.device_memory import MemoryReport, out_of_memory_as_error
from hotsplit.runtime.generate.chat import ChatOptions, Conversation
from hotsplit.runtime.generate.constraints import Constraint
from hotsplit.runtime.generate.dry import BreakersOf, cached_breakers
from hotsplit.runtime.generate.generation import Generation, GenerationOptions, Run, Token, together
from hotsplit.runtime.generate.prompt_cache import PromptKey, predictor_words, weights_digest
from hotsplit.runtime.generate.sampler_chain import SamplerChain, chain_of
from hotsplit.runtime.generate.speculation import Speculation, check_rows, has_equal_rows
from hotsplit.runtime.kernels.cpu import library
from hotsplit.runtime.loading import LoadedModel, load, open_plan, with_positions
from hotsplit.runtime.model.layers import Layer
from hotsplit.runtime.ops.observers import Observation, Observe, Wants
from hotsplit.runtime.step.batch import Wanted, rows_of
from hotsplit.runtime.step.decoder import Decoder
from hotsplit.runtime.step.hybrid_step import HybridStep
from hotsplit.runtime.step.sequences import Part, Sequences, not_tokens
from hotsplit.runtime.step.sequences import Sequence as TextSequence
from hotsplit.runtime.text.chat_template import chat_template_of
from hotsplit.runtime.text.codec import TextCodec
from hotsplit.runtime.weights.drive import Drive

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class Engine:
    """A loaded model, created by `Engine.load`. Not thread-safe."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.model, self.mode, self.traffic = loaded.model, loaded.mode, loaded.traffic
        self._placement, self._sequences = loaded.placement, Sequences(loaded.decoder)
        self.context_length = self._sequences.context_length
        self.bytes_by_role, self.device = loaded.bytes_by_role, loaded.device
        self.load_s = loaded.load_s  # seconds of loading, after the file was opened
        self.memories = loaded.memories  # by GPU
        self.neuron_cache = loaded.neuron_cache
        self.last_run = Run()
        self.last_runs: list[Run] = []

    @classmethod
    @kinds_checked
    def load(
        cls, model: str | Path, split: str | Path | None = None, **options: Unpack[EngineOptions]
    ) -> "Engine":
        """Loads a model file, with or without a plan. `options` are the fields of
        hotsplit.options.engine_config.EngineConfig, which documents them.

        Raises HotsplitError for a wrong file, plan, mode, device or types."""
        return load_engine(model, split, EngineConfig(**options))

    @classmethod
    @kinds_checked
    def of(
        cls, file: ModelFile, plan: Split | None = None, **options: Unpack[EngineOptions]
    ) -> "Engine":
        """Same as `load`, for a model that is already open, or that is not in a file."""
        config = EngineConfig(**options)
        return cls._of(with_positions(file, config), plan, config)

    @classmethod
    @out_of_memory_as_error()
    def _of(cls, file: ModelFile, plan: Split | None, config: EngineConfig) -> "Engine":
        with torch.inference_mode(mode=False):  # a caller may leave that mode
            return cls(load(file, plan, config))

    def _prefill(self, ids_T: Tensor) -> Tensor:
        """The logits f32 [V] after the last token. Overwrites the first sequence, even
        if it is in use."""
        size = self._live.most_tokens
        for number, chunk in enumerate(ids_T.split(size)):
            logits_RV = self._live.run(rows_of(chunk.tolist(), number * size))
        return logits_RV[0]

    def _step(self, token_id: int, position: int) -> Tensor:
        return self._live.step(token_id, position)

    @kinds_checked
    @out_of_memory_as_error()
    @torch.inference_mode()
    def decode_seconds(self, *, steps: int, start: int = 0) -> float:
        """Seconds that `steps` decode steps take at the positions from `start` on, including
        sampling; for benchmarks.

        Needs no text: the first token is 0, the others are the most probable ones, and the cache's
        content before `start`, or that of a recurrent state, is used as it is."""
        if not (steps >= 1 and start >= 0 and start + steps <= self.context_length):
            raise HotsplitError(
                f"{steps} steps from position {start} of a context of {self.context_length}, wanted"
                " 1 or more that end within it"
            )
        chain = SamplerChain(SamplingOptions(temperature=0.0), self.model.spec.vocab_size)
        token_id = 0
        with self._sequences.open(yields=True) as text:
            weights = self._live.weights
            weights.cache.reserve(text.number, 0, start)
            if weights.states is not None and start:
                weights.states.take(text.number, [start])
            began = time.perf_counter()
            for position in range(start, start + steps):
                rows = rows_of([token_id], position, sequence=text.number)
                token_id = chain.sample(self._live.run(rows)[0], ())
            return time.perf_counter() - began

    @kinds_checked
    def observe(
        self, observe: Observe, wants: Wants | None = None, *, routes_in_torch: bool = False
    ) -> Observation:
        """Calls observe(name, layer, tensor) after each named tensor is computed.

        runtime.ops.observers.NAMES lists names and shapes; layer is None outside the layers.
        wants(name, layer) is called first; if it returns false, the tensor is skipped. Observation
        ends with `.remove()` or with the `with` block. A tensor must not be changed, or kept
        without a copy.

        Passes that are observed go layer by layer, in native operations with the bits of a decode
        step; an engine on a GPU refuses them. `routes_in_torch`: torch chooses the experts of a
        mixture (runtime.ops.expert_choices). An observer that is added during a pass takes part
        from the next one on."""
        return self._live.observers.add(observe, wants, routes_in_torch=routes_in_torch)

    @property
    def cache_types(self) -> CacheTypes:
        """Storage types of keys and values."""
        return self._live.weights.cache.types

    @property
    def drive(self) -> Drive | None:
        """What experts are read from that do not fit into main memory, with its statistics."""
        return self._live.weights.drive

    def memory_report(self) -> list[MemoryReport]:
        """Budgeted, reserved and peak bytes of each GPU that holds a part of the model."""
        return [memory.report() for memory in self.memories.values()]

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The loaded layers: their placement and matrices."""
        return self._live.weights.layers

    @cached_property
    def codec(self) -> TextCodec:
        """The model's tokenizer, read on first use."""
        return TextCodec.of(self.model)

    @cached_property
    def _breakers_of(self) -> BreakersOf:
        return cached_breakers(self.codec)

    @cached_property
    def sampling(self) -> SamplingOptions:
        """The settings of the model's file, the rest as in llama.cpp: what texts are sampled with
        that are given no others; `dataclasses.replace` changes some. Raises HotsplitError for a
        file with impossible ones."""
        return self.sampling_with({})

    @kinds_checked
    def sampling_with(self, given: Mapping[str, object]) -> SamplingOptions:
        """`sampling`, in which the `given` fields replace those of the file."""
        known = [field.name for field in fields(SamplingOptions)]
        if unknown := [name for name in given if name not in known]:
            raise HotsplitError(
                f"no sampling option {shown(unknown[0])}; known: {', '.join(known)}"
            )
        return sampling_of(self.model.path, self.model.extra_keys, given)

    def _chain(self, sampling: SamplingOptions) -> SamplerChain:
        return chain_of(sampling, self._breakers_of, self.model.spec.vocab_size)

    @out_of_memory_as_error()
    def hidden(self, token_ids: Sequence[int] | Tensor) -> None:
        """Runs a text through all layers but not the head; for observers."""
        self._run_alone(token_ids, "none")

    @kinds_checked
    @out_of_memory_as_error()
    def hidden_states(self, sequence: TextSequence, token_ids: Sequence[int]) -> Tensor:
        """Appends and computes tokens of a sequence, layer by layer (see `observe`); returns their
        hidden states after the last norm, f32 [T, D] on the CPU."""
        weights, found = self._live.weights, list[Tensor]()
        # Where operations follow the last layer, a value after them is seen, of tokens with logits.
        at: tuple[str, int | None] = "layer_out", len(weights.layers) - 1
        wanted: Wanted = "none"
        norm = weights.output_norm
        if weights.last:
            at, wanted, norm = ("output_norm", None), "all", None

        def keep(_name: str, _layer: int | None, x_TD: Tensor) -> None:
            found.append((x_TD if norm is None else norm.apply(x_TD)).float().cpu().clone())

        with self._live.observers.add(keep, lambda *seen: seen == at):
            sequence.extend(token_ids, wanted)
        return torch.cat(found)[-len(token_ids) :]  # what is before them has been repeated

    @out_of_memory_as_error()
    def logits(self, token_ids: Sequence[int] | Tensor) -> Tensor:
        """The logits after each token of a whole text, f32 [T, V] on the CPU."""
        return self._run_alone(token_ids, "all")

    def _run_alone(self, token_ids: Sequence[int] | Tensor, wanted: Wanted) -> Tensor:
        ids_T = self._ids(token_ids)
        with self._sequences.open(yields=True) as text:
            return text.extend(ids_T.tolist(), wanted)

    def sequence(self) -> TextSequence:
        """Opens a sequence for one text, kept until it is closed: see runtime.step.sequences.

        Raises HotsplitError if all `num_sequences` are in use."""
        return self._sequences.open()

    @kinds_checked
    @out_of_memory_as_error()
    def run(self, parts: Iterable[Part]) -> list[Tensor]:
        """Computes tokens of several sequences, in shared steps if the engine `has_row_steps`.
        Returns the logits of each part, f32 [R, V]; with `has_equal_rows` they are bit-identical to
        those of the part alone."""
        return self._sequences.run(parts)

    @kinds_checked
    def generate(
        self,
        prompt: str | Sequence[int],
        max_tokens: int = 128,
        temperature: float | None = None,
        seed: int | None = None,
        *,
        sampling: SamplingOptions | None = None,
        options: GenerationOptions | None = None,
        constraint: Constraint | None = None,
        drafts: Speculation | None = None,
        sequence: TextSequence | None = None,
    ) -> Iterator[Token]:
        """Yields tokens as they are generated; afterwards `last_run` has their statistics.

        `sampling` defaults to the model's, `Engine.sampling`; temperature (0 is greedy) and seed
        (makes a run repeatable) override those of `sampling`. `options` replaces max_tokens.
        `constraint` restricts the text, see runtime.generate.constraints. `drafts` guesses tokens,
        which changes only the speed. `sequence` keeps the text; its common prefix with the prompt
        is not computed again. Without one, the text is not kept. Raises HotsplitError for a prompt
        that is too long, and for one without tokens: an empty text, if the model has no token to
        begin with."""
        numbers = {"temperature": temperature, "seed": seed}
        given = {name: value for name, value in numbers.items() if value is not None}
        sampling = replace(sampling, **given) if sampling else self.sampling_with(given)  # type: ignore[arg-type]
        options = options or GenerationOptions(max_tokens=max_tokens)
        made = self._generation_of(prompt, sampling, options, constraint, drafts)
        return self._generate(made, sequence)

    def _generation_of(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingOptions,
        options: GenerationOptions,
        constraint: Constraint | None,
        drafts: Speculation | None,
    ) -> Callable[[TextSequence], Generation]:
        """Checks the arguments; returns a function that starts the generation in a sequence."""
        if drafts is not None:
            check_rows(self._live)
        if options.shift_keep is not None and 2 * options.shift_keep > self.context_length:
            raise HotsplitError(
                f"{options.shift_keep} tokens to keep (--keep) of a context of"
                f" {self.context_length}, wanted at most half of it"
            )
        ids_T = self._ids(self.codec.encode(prompt) if isinstance(prompt, str) else prompt)
        chain = self._chain(sampling)
        return lambda text: Generation(
            text, ids_T.tolist(), self.codec, chain, options, self.traffic, constraint, drafts
        )

    def _generate(
        self, generation_of: Callable[[TextSequence], Generation], sequence: TextSequence | None
    ) -> Iterator[Token]:
        text = self._sequences.open(yields=True) if sequence is None else sequence
        try:
            generation = generation_of(text)
            self.last_run = generation.run
            with out_of_memory_as_error():
                yield from generation.tokens()
        finally:
            if sequence is None:
                text.close()

    @kinds_checked
    def generate_many(
        self,
        prompts: Sequence[str | Sequence[int]],
        sampling: SamplingOptions | None = None,
        options: GenerationOptions | None = None,
        constraints: Sequence[Constraint] = (),
        drafts: Sequence[Speculation] = (),
    ) -> Iterator[tuple[int, Token]]:
        """Generates several texts in shared steps and yields (index of the prompt, token). Each
        text is the one that `generate` would yield if the engine `has_equal_rows`; otherwise
        rounding in shared steps may change it. `drafts`: of each text, if any (runtime.drafting).
        `last_runs` has one entry per prompt.

        Raises HotsplitError for more prompts than free sequences."""
        held, drafting = list(constraints), list(drafts)
        check_kind("constraints", held, list[Constraint])
        check_kind("drafts", drafting, list[Speculation])
        makers = [
            self._generation_of(
                prompt,
                sampling or self.sampling,
                options or GenerationOptions(),
                held[n] if held else None,
                drafting[n] if drafting else None,
            )
            for n, prompt in enumerate(prompts)
        ]
        with ExitStack() as stack:
            texts = [stack.enter_context(self._sequences.open()) for _ in makers]
            found = [make(text) for make, text in zip(makers, texts, strict=True)]
            self.last_runs = [generation.run for generation in found]
            yield from together(found, self.run)

    @kinds_checked
    def chat(
        self,
        system: str | None = None,
        *,
        template: str | None = None,
        sampling: SamplingOptions | None = None,
        options: ChatOptions | None = None,
        new_constraint: Callable[[], Constraint] | None = None,
        drafts: Speculation | None = None,
    ) -> Conversation:
        """Starts a conversation in a sequence of its own: see runtime.generate.chat.

        `template`: the name of a template or a file; None takes the model's own. `new_constraint`
        creates the constraint of each answer. Raises HotsplitError if there is no template, or no
        sequence is free."""
        found = chat_template_of(self.model, self.codec, template)
        if drafts is not None:
            check_rows(self._live)
        chain = self._chain(sampling or self.sampling)
        return Conversation(
            self.sequence(),
            self.codec,
            found,
            self.traffic,
            chain,
            system=system,
            options=options,
            new_mask=new_constraint,
            drafts=drafts,
        )

    @property
    def has_draft_block(self) -> bool:
        """True if the model's draft block is loaded."""
        return self._live.draft is not None

    def prompt_key(self) -> PromptKey:
        """What the state of a text depends on: see runtime.generate.prompt_cache."""
        return PromptKey(
            model_id=self.model.model_id,
            weights=weights_digest(self.model),
            mode=self.mode,
            arithmetic=library.level(),
            vocab_size=self.model.spec.vocab_size,
            cache=str(self._live.weights.cache.types),
            thresholds=tuple(self.model.threshold_L),
            rope_scaling=self.model.spec.rope_scaling.words,
            activation=self.model.activation,
            predictors=predictor_words(self.model) if self.mode == "predicted" else "",
            placement=self._placement.words,
        )

    @property
    def has_equal_rows(self) -> bool:
        """True if every row of any pass is bit-identical to a single step."""
        return has_equal_rows(self._live)

    @property
    def has_row_steps(self) -> bool:
        """True if a decode step takes tokens of several texts. On a GPU it takes one token if there
        is a neuron cache, or keys are in main memory, or the workspace has no room for more."""
        native = self._live.native
        return self.has_equal_rows or (isinstance(native, HybridStep) and native.max_rows > 1)

    def close(self) -> None:
        """Frees the weights and the cache; the engine cannot be used afterwards."""
        library.set_spin_time()
        for device in self.memories:  # waits for interrupted uploads too
            torch.cuda.synchronize(device)
        if self._sequences.decoder is not None and self.drive is not None:
            self.drive.close()
        self._sequences.decoder = None
        if self.neuron_cache is not None:
            self.neuron_cache.slots = None  # they hold weights too
        if self.device.type == "cuda":
            gc.collect()  # a captured step and its inputs refer to each other
            for memory in self.memories.values():
                memory.close()
            torch.cuda.empty_cache()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def _live(self) -> Decoder:
        return self._sequences.live

    def _ids(self, token_ids: Sequence[int] | Tensor) -> Tensor:
        try:
            given = torch.as_tensor(token_ids)
        except (TypeError, ValueError, RuntimeError) as error:
            raise not_tokens(token_ids) from error
        if given.ndim != 1:
            raise not_tokens(token_ids)
        if not len(given):
            raise HotsplitError("the prompt has no tokens; give it some text")
        if given.dtype not in _INTEGERS:
            raise HotsplitError(f"token ids are of type {given.dtype}, wanted integers")
        ids_T = given.to(torch.int64).cpu()
        vocab_size = self.model.spec.vocab_size
        if len(ids_T) > self.context_length:
            longest = self.model.spec.context_length
            is_too_long = len(ids_T) > longest
            load = f"load with -c {longest} and " if self.context_length < longest else ""
            step = (
                f"the model reads {longest} at most: {load}shorten the text by more than"
                f" {len(ids_T) - longest}"
                if is_too_long
                else f"load with a longer context (-c), up to {longest}, or shorten the text"
            )
            raise HotsplitError(
                f"{len(ids_T)} tokens for a context of {self.context_length}; {step}"
            )
        if ids_T.min() < 0 or ids_T.max() >= vocab_size:
            raise HotsplitError(f"token ids must be in 0..{vocab_size - 1}")
        return ids_T


def load_engine(model: str | Path, split: str | Path | None, config: EngineConfig) -> Engine:
    """Same as `Engine.load`, with its options as one configuration."""
    file = with_positions(ModelFile.load(Path(model)), config)
    return Engine._of(file, open_plan(split, file), config)
