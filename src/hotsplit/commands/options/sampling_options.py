"""The sampling options of a command, in llama.cpp's spellings.

The command's own help has a few; --help-sampling explains all of them."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click

from hotsplit.commands.options.command_options import Parsed, joined, say
from hotsplit.commands.options.constraint_options import constraint_options
from hotsplit.commands.options.engine_options import long_text_options
from hotsplit.commands.options.speculation_options import speculation_options
from hotsplit.options.generation_options import (
    DEFAULT_SAMPLERS,
    SamplingOptions,
    bias_of,
    samplers_of_names,
)
from hotsplit.options.model_sampling import SETTINGS, sampling_line

if TYPE_CHECKING:
    from hotsplit.runtime.engine import Engine

Command = TypeVar("Command", bound=Callable[..., Any])
_RANDOM_SEEDS = (-1,)  # llama.cpp's value for a random seed
# Groups of options: spellings | field of SamplingOptions | help. The help of a command has those
# with a star.
_ROWS = f"""
# Temperature
--temp --temperature | temperature* | Temperature; 0 or less always takes the likeliest token.
--dynatemp-range | dynatemp_range | Temperature moves by up to N with the entropy; 0: fixed.
--dynatemp-exp | dynatemp_exponent | Exponent of the entropy for --dynatemp-range.
# Which tokens are candidates
--top-k | top_k* | Keep the N likeliest tokens; 0: off.
--top-p | top_p* | Keep the likeliest tokens whose probabilities add up to N; 1: off.
--min-p | min_p* | Keep tokens with at least N times the best one's probability; 0: off.
--typical --typical-p | typ_p | Locally typical sampling; 1: off.
--top-nsigma --top-n-sigma | top_n_sigma | Keep logits within N standard deviations of the best; 0
    or less: off.
--xtc-probability | xtc_probability | How often the likeliest tokens are left out; 0: off.
--xtc-threshold | xtc_threshold | Minimum probability of tokens left out; over 0.5: off.
-l --logit-bias | logit_bias | Added to a token's logit: 15043+1, 15043-inf; may be repeated.
# Repetition
--repeat-penalty | repeat_penalty* | Penalty for recent tokens; 1: off.
--repeat-last-n | repeat_last_n | How many tokens are recent; 0: off, -1: all.
--presence-penalty | presence_penalty | Subtracted from the logit of each recent token; 0: off.
--frequency-penalty | frequency_penalty | The same, times how often it appeared; 0: off.
--dry-multiplier | dry_multiplier | DRY: penalty for continuing a repetition; 0: off.
--dry-base | dry_base | Factor by which the penalty grows with every token.
--dry-allowed-length | dry_allowed_length | Length of a repetition from which the penalty applies.
--dry-penalty-last-n | dry_penalty_last_n | Tokens that are searched; 0: off, -1: all.
--dry-sequence-breaker | dry_sequence_breakers | Text that ends a repetition, instead of newline : "
    *; may be repeated; none: off.
# Mirostat, instead of the samplers above except temperature and logit bias
--mirostat | mirostat | 1 or 2 for its versions; 0: off.
--mirostat-lr | mirostat_lr | Learning rate (eta).
--mirostat-ent | mirostat_ent | Target entropy in bits (tau).
# Adaptive-p, the last sampler if --samplers names it
--adaptive-target | adaptive_target | Prefers tokens near this probability; below 0: off.
--adaptive-decay | adaptive_decay | Factor per token on the weight of earlier draws.
# Order and seed
--samplers | samplers | Samplers in order; "" draws from the model's own probabilities. [default:
    {";".join(DEFAULT_SAMPLERS)}]
-s --seed | seed* | Random seed, for repeatable results; -1: a new one each time.
"""
# Type and metavar of the options whose default is not a number.
_TYPES: dict[str, tuple[Any, str | None]] = {
    "logit_bias": (Parsed("logit bias", bias_of), "TOKEN(+/-)BIAS"),
    "dry_sequence_breakers": (str, "TEXT"),
    "samplers": (str, '"A;B;C"'),
    "seed": (int, None),
}
_REPEATED = ("logit_bias", "dry_sequence_breakers")


class _Option(NamedTuple):
    """An option that sets `field` of SamplingOptions."""

    spellings: str
    field: str
    help: str
    is_common: bool


def _groups() -> dict[str, list[_Option]]:
    groups: dict[str, list[_Option]] = {}
    for row in _ROWS.replace("\n    ", " ").strip().splitlines():
        if row.startswith("# "):
            options = groups[row.removeprefix("# ")] = []
            continue
        spellings, field, words = row.split(" | ")
        field, star, _ = field.partition("*")
        if field not in _TYPES:
            source = "the model's, or " if any(s.field == field for s in SETTINGS) else ""
            words += f" [default: {source}{getattr(SamplingOptions, field)}]"
        options.append(_Option(spellings, field, words, bool(star)))
    return groups


_GROUPS = _groups()
_OPTIONS = [option for group in _GROUPS.values() for option in group]


def sampling_options(command: Command) -> Command:
    """Adds all sampling options to a click command. Their values come in as keyword arguments,
    which `take_sampling_options` turns into fields of SamplingOptions."""
    command = click.option(
        "--help-sampling",
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=_show_help,
        help="Show all sampling options: penalties, DRY, XTC, Mirostat, their order.",
    )(command)
    for option in reversed(_OPTIONS):
        kind, metavar = _TYPES.get(
            option.field, (type(getattr(SamplingOptions, option.field)), None)
        )
        command = click.option(
            *option.spellings.split(),
            option.field,
            type=kind,
            metavar=metavar,
            multiple=option.field in _REPEATED,
            hidden=not option.is_common,
            help=option.help,
        )(command)
    return command


# All options on how the tokens of a text are found.
decoding_options = joined(
    sampling_options, constraint_options, speculation_options, long_text_options
)


def take_sampling_options(arguments: dict[str, Any]) -> dict[str, object]:
    """The fields of SamplingOptions that are given, from a command's keyword arguments, from which
    they are removed. Raises HotsplitError for an invalid value."""
    options = {option.field: arguments.pop(option.field) for option in _OPTIONS}
    given = {name: value for name, value in options.items() if value not in (None, ())}
    if options["samplers"] is not None:
        given["samplers"] = samplers_of_names(options["samplers"])
    if breakers := options["dry_sequence_breakers"]:
        # llama.cpp: "none" clears earlier ones.
        last = max((i for i, breaker in enumerate(breakers) if breaker == "none"), default=-1)
        given["dry_sequence_breakers"] = tuple(breakers[last + 1 :])
    if options["seed"] in _RANDOM_SEEDS:
        given["seed"] = None
    SamplingOptions(**given)  # refuses impossible values before the imports, which take seconds
    return given


def model_sampling(engine: "Engine", given: Mapping[str, object]) -> SamplingOptions:
    """The options of a text: those `given`, else the model file's, which a line says."""
    line = sampling_line(engine.model.path, engine.model.extra_keys, given)
    if line is not None:
        say(line)
    return engine.sampling_with(given)


def _show_help(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if not value or ctx.resilient_parsing:
        return
    formatter = ctx.make_formatter()
    formatter.write_text("The samplers run in order, then one token is drawn.")
    for title, options in _GROUPS.items():
        with formatter.section(title):
            formatter.write_dl(
                [
                    (
                        f"{', '.join(o.spellings.split())} {_TYPES.get(o.field, (0, 0))[1] or 'N'}",
                        o.help,
                    )
                    for o in options
                ]
            )
    click.echo(formatter.getvalue(), nl=False)
    ctx.exit()
