"""bench against llama.cpp itself: both sides are measured, and a model that it cannot load is
reported."""

from pathlib import Path

import pytest

from hotsplit.commands.options.command_options import take_engine_options
from hotsplit.errors import HotsplitError
from hotsplit.measure.bench.bench import bench
from hotsplit.measure.bench.bench_config import BenchConfig

ROOT = Path(__file__).parent.parent.parent
PYTHON = ROOT / "build/llamacpp-venv/bin/python"
MODEL = ROOT / "build/smollm2/q8_0.gguf"
STOCK = ROOT / "build/smollm2/q8_0-stock.gguf"


def config_of(**options) -> BenchConfig:
    given = {"model": MODEL, "mode": "dense", "device": "cpu", "compare": PYTHON}
    given |= {"prompt_lengths": (8,), "gen_lengths": (3,), "depths": (0, 4), "repetitions": 2}
    given |= options
    return BenchConfig(engine=take_engine_options(given), **given)


@pytest.mark.parametrize("kind", [None, "q8_0"])
def test_both_sides_are_measured(kind: str | None) -> None:
    report = bench(config_of(compare_model=STOCK, cache_type_k=kind))
    assert report.rival is not None and report.rival.tool.startswith("llama-cpp-python")
    assert report.rival.model_n_params == report.setting.model_n_params
    assert report.rival.vocab_size == 49_152
    for result in report.results:
        assert result.theirs is not None and len(result.theirs.samples_ns) == 2
        assert all(0.01 < ratio < 100 for ratio in result.ratios)
    assert not any("two models" in note for note in report.notes)


@pytest.mark.parametrize("content, words", [(b"", "cannot load the model"), (None, "ffn_down")])
def test_a_model_that_llama_cpp_cannot_load_is_reported(
    tmp_path: Path, content: bytes | None, words: str
) -> None:
    path = MODEL if content is None else tmp_path / "empty.gguf"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(HotsplitError, match=words):
        bench(config_of(compare_model=path))
