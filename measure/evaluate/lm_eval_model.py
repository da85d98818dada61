"""An engine as lm-eval's model interface: log-likelihoods of continuations, and generated texts.

Tokens, windows and truncation are those of lm-eval's own model for transformers, so that the
numbers are comparable. This imports lm_eval, so import it only where tasks are run (see tasks).

Letters: T tokens, V vocabulary."""

import math
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from hotsplit.errors import HotsplitError
from hotsplit.files.typed import shown
from hotsplit.options.generation import GenerationOptions, SamplingOptions
from hotsplit.runtime.engine import Engine
from hotsplit.runtime.step.sequences import Sequence as TextSequence

MAX_TOKENS = 256  # default of a task without a limit; lm-eval's own
LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
KNOWN = {*LIMITS, "until", "do_sample", "temperature", "top_k", "top_p", "min_p"}

Scored = tuple[float, bool]  # log-likelihood, and whether greedy decoding gives the same tokens


class EngineModel(TemplateLM):
    """The model that lm-eval asks. Up to `num_texts` prompts are continued together; `is_asked` is
    true once a request has come."""

    def __init__(
        self,
        engine: Engine,
        *,
        num_texts: int = 1,
        seed: int = 0,
        on_requests: Callable[[float], None] = lambda count: None,
    ) -> None:
        super().__init__()
        self.engine, self.num_texts, self.seed = engine, num_texts, seed
        self.on_requests, self.is_asked = on_requests, False

    @property
    def eot_token_id(self) -> int:
        ends = self.engine.codec.end_ids
        return min(ends) if ends else self.prefix_token_id

    @property
    def prefix_token_id(self) -> int:
        """The token before a text with no context."""
        codec = self.engine.codec
        known = [codec.begin_id] if codec.begin_id is not None else sorted(codec.end_ids)
        if not known:
            raise HotsplitError(
                f"{self.engine.model.path}: its tokenizer has no token that begins or ends a text,"
                " which tasks need; convert the checkpoint again"
            )
        return known[0]

    @property
    def max_length(self) -> int:
        return self.engine.context_length

    @property
    def tokenizer_name(self) -> str:
        return self.engine.model.model_id

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: object
    ) -> list[int]:
        """Token ids. By default the tokenizer's begin token, if it adds one, comes first unless the
        text is empty or begins with it. `add_special_tokens` decides otherwise; an empty text gets
        none in any case."""
        codec = self.engine.codec
        begins = add_special_tokens
        if begins is None:
            begin = codec.tokenizer.decode([self.prefix_token_id], skip_special_tokens=False)
            begins = not (begin and string.startswith(begin))
        return codec.encode(string) if begins and string else codec.encode_rendered(string)

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = True) -> list[Scored]:
        return super().loglikelihood(requests, disable_tqdm=True)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = True) -> list[float]:
        """Log-likelihoods of whole texts, cut into windows so that each token is predicted once."""
        found = []
        for request in requests:
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]), prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length, context_len=1,
            )  # fmt: skip
            parts = [(("", ""), *make_disjoint_window(window)) for window in windows]
            found.append(sum(score for score, _ in self._scores(parts)))
            self.on_requests(1)
        return found

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **kwargs: object
    ) -> list[Scored]:
        return self._scores(requests, self.on_requests)

    def _scores(
        self,
        requests: Sequence[tuple[tuple[str, str], list[int], list[int]]],
        on_requests: Callable[[float], None] = lambda count: None,
    ) -> list[Scored]:
        """Scores in the order of the requests. They are computed in the order of their tokens, so
        that neighbours share long prefixes (the examples before a question, the question before its
        answers), which are computed once."""
        self.is_asked = True
        texts = [self._cut(context, more) for _, context, more in requests]
        found: list[Scored | None] = [None] * len(texts)
        order = sorted(range(len(texts)), key=lambda number: texts[number])
        with self.engine.sequence() as place:
            for number in order:
                found[number] = _score(place, *texts[number])
                on_requests(1)
        return [score for score in found if score is not None]

    def _cut(self, context: list[int], more: list[int]) -> tuple[list[int], list[int]]:
        """The end of the context that fits together with `more`, whose last token is not run.

        Raises HotsplitError if either is empty, and if `more` does not fit."""
        if not context:
            raise HotsplitError(
                f"a continuation of {len(more)} tokens after none; wanted one or more tokens before"
                " it: the task must not leave the context empty"
            )
        if not 0 < len(more) <= self.max_length:
            raise HotsplitError(
                f"a continuation of {len(more)} tokens after {len(context)}; wanted 1 to"
                f" {self.max_length}, which is the context"
            )
        room = self.max_length + 1 - len(more)
        return context[-room:], more

    def generate_until(self, requests: list[Any], disable_tqdm: bool = True) -> list[str]:
        """Generated texts; requests with equal options are run together, `num_texts` at a time."""
        self.is_asked = True
        found = [""] * len(requests)
        alike: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            alike.setdefault(repr(sorted(request.args[1].items())), []).append(number)
        for numbers in alike.values():
            for start in range(0, len(numbers), self.num_texts):
                some = numbers[start : start + self.num_texts]
                for number, text in zip(some, self._continue(requests, some), strict=True):
                    found[number] = text
                    self.on_requests(1)
        return found

    def _continue(self, requests: list[Any], numbers: Sequence[int]) -> list[str]:
        sampling, options = options_of(requests[numbers[0]].args[1], self.seed)
        room = self.max_length - options.max_tokens
        if room < 1:
            raise HotsplitError(
                f"the task asks for up to {options.max_tokens} tokens, and the context has"
                f" {self.max_length}; there is no room for the question"
            )
        prompts = [self.tok_encode(requests[number].args[0])[-room:] for number in numbers]
        texts = [""] * len(prompts)
        for number, token in self.engine.generate_many(prompts, sampling, options):
            texts[number] += token.text
        return texts


def _score(place: TextSequence, context: list[int], more: list[int]) -> Scored:
    """The score of `more` after `context`. The part of the context that the previous text also
    begins with is not run again, except for the context's last token."""
    wanted = context + more[:-1]
    pairs = zip(place.ids, wanted, strict=False)
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    # The logits after the context's last token are needed, and only new tokens have logits.
    place.rollback(min(same, len(context) - 1))
    new = wanted[place.length :]
    num_before = len(context) - 1 - place.length  # new tokens whose logits are not read
    if num_before:
        place.extend(new[:num_before], "none")
    logits_TV = place.extend(new[num_before:], "all")
    logprob_TV = logits_TV.double().log_softmax(dim=1)
    more_T = torch.tensor(more)
    score = logprob_TV.gather(1, more_T[:, None]).sum().item()
    return score, bool((logprob_TV.argmax(dim=1) == more_T).all())


def options_of(asked: dict[str, Any], seed: int) -> tuple[SamplingOptions, GenerationOptions]:
    """A task's generation_kwargs as our options. Raises HotsplitError for unknown options, and
    for a temperature or a limit that is not a number."""
    unknown = sorted(set(asked) - KNOWN)
    if unknown:
        raise HotsplitError(
            f"the task asks for the unknown generation option {shown(unknown[0])}; known:"
            f" {', '.join(sorted(KNOWN))}"
        )
    until = asked.get("until") or []
    stops = (until,) if isinstance(until, str) else tuple(until)
    limit = next((name for name in LIMITS if asked.get(name) is not None), None)
    max_tokens = float(MAX_TOKENS) if limit is None else _number(limit, asked[limit])
    if max_tokens % 1:
        raise HotsplitError(f"the task asks for {limit} {max_tokens:g}; wanted a whole number")
    temperature = _number("temperature", asked.get("temperature") or 0.0)
    is_greedy = asked.get("do_sample") is False or temperature <= 0
    own = {name: asked[name] for name in ("top_k", "top_p", "min_p") if name in asked}
    # Samplers that a task does not name are off; the defaults of SamplingOptions are llama.cpp's.
    chosen = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, **own}
    sampling = SamplingOptions(temperature=0.0 if is_greedy else temperature, seed=seed, **chosen)
    return sampling, GenerationOptions(
        max_tokens=int(max_tokens), stops=tuple(s for s in stops if s)
    )


def _number(name: str, given: Any) -> float:
    try:
        number = float(given)  # YAML reads 1e-3 as text
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise HotsplitError(f"the task asks for {name} {shown(given)}; wanted a number")
    return number
