"""Defaults of configs: for every key that is read, ours is that of transformers' config class, or
the config is refused. Oracle: the defaults of the config classes of transformers."""

import dataclasses
from pathlib import Path

import pytest
from checkpoints import class_of
from test_families import CASES
from transformers import (
    GraniteMoeHybridConfig,
    KimiLinearConfig,
    Lfm2Config,
    Lfm2MoeConfig,
    PretrainedConfig,
)

from hotsplit.errors import HotsplitError
from hotsplit.families import config_reader
from hotsplit.families.from_config import read_blueprint
from hotsplit.families.table import FAMILIES

PATH = Path("config.json")
ROWS = 1 << 20


def config_of(case: str) -> dict:
    """A config with all keys that transformers has but those about each layer, so that each can be
    left out."""
    config = CASES[case]
    values = config.to_dict() | {"architectures": [class_of(config).__name__]}
    values = values.pop("text_config", {}) | values  # as Qwen2-VL's
    values["max_position_embeddings"] = 10_000  # longer than any window
    by_layer = ("layer_types", "per_layer_config")
    # Without them, its layers are recurrent, or share keys with none before them.
    shared = getattr(config, "num_kv_shared_layers", 0)
    hybrids = GraniteMoeHybridConfig | KimiLinearConfig | Lfm2Config | Lfm2MoeConfig
    if isinstance(config, hybrids) or (shared and config.model_type == "gemma4_text"):
        by_layer = by_layer[1:]
    return {key: value for key, value in values.items() if key not in by_layer}


def class_of_text(config: PretrainedConfig) -> type[PretrainedConfig]:
    return type(config.get_text_config())


def facts(values: dict) -> object:
    """The result of a config: a blueprint without its functions, or a refusal."""
    try:
        plan = read_blueprint(PATH, values, ROWS)
    except HotsplitError:
        return "refused"
    rows = {name: (r.source, r.order.tolist(), r.num_rows) for name, r in plan.rows.items()}
    # The key's default gives True; a missing key gives None, with which a head is allowed.
    is_tied = plan.is_tied is not False
    factors = {name: each.tolist() for name, each in plan.rope_factors.items()}
    columns = {name: order.tolist() for name, order in plan.columns.items()}
    kept = dataclasses.replace(
        plan, rows={}, columns={}, rope_factors={}, factors={}, name_of=str, is_tied=is_tied
    )
    of_rows = {name: each.tolist() for name, each in plan.factors.items()}
    return kept, rows, columns, factors, of_rows


class Recorder(dict):
    """Records the keys that are read."""

    asked: set[str] = set()

    def get(self, key, default=None):
        self.asked.add(key)
        return super().get(key, default)

    def __getitem__(self, key):
        self.asked.add(key)
        return super().__getitem__(key)


def keys_read(values: dict, monkeypatch) -> set[str]:
    Recorder.asked = set()
    init = config_reader.ConfigReader.__init__

    def recording(self, *arguments, **options):
        init(self, *arguments, **options)
        if not self.prefix:
            self.values = Recorder(self.values)

    with monkeypatch.context() as patch:
        patch.setattr(config_reader.ConfigReader, "__init__", recording)
        read_blueprint(PATH, values, ROWS)
    return Recorder.asked


@pytest.mark.parametrize("case", CASES)
def test_a_missing_key_has_the_default_of_transformers(case, monkeypatch):
    values, fields = config_of(case), class_of_text(CASES[case]).__dataclass_fields__
    keys = keys_read(values, monkeypatch)
    assert len(keys) > 12 and facts(values) != "refused"
    for key in keys & values.keys() & fields.keys():
        without = {k: v for k, v in values.items() if k != key}
        found = facts(without)
        default = fields[key].default
        assert found == "refused" or found == facts(without | {key: default}), key


# Keys that a class of transformers has no field for, but a default in its __post_init__.
DERIVED = {("KimiLinearForCausalLM", "first_k_dense_replace"): 1}


def test_the_table_of_defaults_equals_that_of_transformers():
    classes = {class_of(config).__name__: class_of_text(config) for config in CASES.values()}
    for name, kind in classes.items():
        for key, value in FAMILIES[name].defaults.items():
            others = {theirs: own for own, theirs in kind.attribute_map.items()}
            fields = kind.__dataclass_fields__
            field = fields.get(key) or fields.get(others.get(key, key))
            # mistral's class has no key for biases, which its layers do not have
            default = DERIVED.get((name, key), False) if field is None else field.default
            assert default == value, (name, key)


def test_the_comparison_finds_another_default():
    values = config_of("mistral")
    assert facts(values) != facts(values | {"sliding_window": 8})
    assert facts(values) != facts(values | {"rms_norm_eps": 0.5})
    assert facts(values | {"sliding_window": None}) == facts(values)
