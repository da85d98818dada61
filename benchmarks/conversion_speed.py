"""Benchmarks `hotsplit convert` against llama.cpp's convert_hf_to_gguf.py, on a random 1.1 B
Llama in bf16.

Ours runs with --no-verify, because the rival does not verify.

Each round runs both programs for each type, in turn, and copies the checkpoint's bytes with an
fsync, which is the least a conversion to 16 bits can take. Times are those of the whole command,
including Python's start. Ours waits until the file is on the disk, the rival does not, so ours is
also run with fsync switched off. The rival does not write q4_0, so ours is compared with the
rival's f16, which its users would then pass to llama-quantize.

Memory: the peak of RssAnon (sampled every 20 ms), and ru_maxrss, which counts mapped files too."""

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from gguf import GGUFReader
from machine import machine, write_result

RIVAL_OUTTYPE = {"f16": "f16", "bf16": "bf16", "q8_0": "q8_0", "q4_0": "f16"}
WITHOUT_FSYNC = (
    "import os, sys; os.fsync = lambda descriptor: None;"
    "from hotsplit.cli import main; sys.exit(main(sys.argv[1:]))"
)


@dataclass(frozen=True, kw_only=True)
class ConversionRun:
    seconds: float
    cpu_seconds: float
    anonymous_mib: float
    max_rss_mib: float


def main() -> None:
    arguments = _arguments()
    folder = Path(tempfile.mkdtemp(prefix="convert-benchmark-", dir=arguments.work_dir))
    try:
        checkpoint = folder / "checkpoint"
        # In a separate process: ru_maxrss of a command starts with the memory of its parent.
        maker = Path(__file__).with_name("random_checkpoint.py")
        subprocess.run([sys.executable, maker, checkpoint, str(arguments.num_layers)], check=True)
        outtypes = arguments.outtypes.split(",")
        rounds = [_round(arguments.rival, checkpoint, outtypes) for _ in range(arguments.rounds)]
        equal = {o: _count_equal(arguments.rival, checkpoint, o) for o in outtypes if o != "q4_0"}
        result = {
            "benchmark": "convert",
            "machine": machine(),
            "source_bytes": sum(p.stat().st_size for p in checkpoint.glob("*.safetensors")),
            "rounds": arguments.rounds,
            "load_1_5_15_min": os.getloadavg(),
            "copy": _median([r["copy"] for r in rounds]),
            "types": {outtype: _summary(outtype, rounds) for outtype in outtypes},
            "tensors_equal_to_rival_in_stock_layout": equal,
        }
    finally:
        shutil.rmtree(folder)
    write_result(result, "convert", arguments.output)
    print(json.dumps(result))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Raw)
    parser.add_argument("rival", type=Path, help="path of convert_hf_to_gguf.py")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--work-dir", type=Path, help="folder with 8 GB of free space")
    parser.add_argument("--outtypes", default="f16,q8_0,q4_0")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--num-layers", type=int, default=22)
    return parser.parse_args()


class _Raw(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    pass


def _round(rival: Path, checkpoint: Path, outtypes: list[str]) -> dict[str, ConversionRun]:
    runs = {"copy": _copy(checkpoint)}
    for outtype in outtypes:
        theirs = RIVAL_OUTTYPE[outtype]
        if f"rival {theirs}" not in runs:
            runs[f"rival {theirs}"] = _watch(_rival_command(rival, checkpoint, theirs))
        options = _our_options(checkpoint, outtype)
        runs[f"ours {outtype}"] = _watch([sys.executable, "-m", "hotsplit", *options])
        runs[f"no fsync {outtype}"] = _watch([sys.executable, "-c", WITHOUT_FSYNC, *options])
    for name, run in runs.items():
        print(f"{name}: {run.seconds:.1f} s, {run.max_rss_mib:.0f} MiB", file=sys.stderr)
    return runs


def _rival_command(rival: Path, checkpoint: Path, outtype: str) -> list[str]:
    output = str(checkpoint.parent / "rival.gguf")
    return [sys.executable, str(rival), str(checkpoint), "--outfile", output, "--outtype", outtype]


def _our_options(checkpoint: Path, outtype: str) -> list[str]:
    output = str(checkpoint.parent / "ours.gguf")
    options = ["-o", output, "--outtype", outtype, "--no-verify", "--force"]
    return ["convert", str(checkpoint), *options]


def _watch(command: list[str]) -> ConversionRun:
    """Runs a command to its end; stops the benchmark if it fails."""
    os.sync()  # so that earlier writes do not count
    started, anonymous_kib = time.perf_counter(), 0
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while True:
        pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        if pid:
            break
        found = re.search(r"RssAnon:\s+(\d+)", Path(f"/proc/{process.pid}/status").read_text())
        anonymous_kib = max(anonymous_kib, int(found[1]) if found else 0)
        time.sleep(0.02)
    seconds = time.perf_counter() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        sys.exit(f"{' '.join(command)}: exit {process.returncode}; run it alone to see why")
    return ConversionRun(
        seconds=seconds,
        cpu_seconds=usage.ru_utime + usage.ru_stime,
        anonymous_mib=anonymous_kib / 1024,
        max_rss_mib=usage.ru_maxrss / 1024,
    )


def _copy(checkpoint: Path) -> ConversionRun:
    sources = " ".join(str(path) for path in sorted(checkpoint.glob("*.safetensors")))
    target = checkpoint.parent / "copy"
    run = _watch(["sh", "-c", f"cat {sources} > {target} && sync {target}"])
    target.unlink()
    return run


def _summary(outtype: str, rounds: list[dict[str, ConversionRun]]) -> dict[str, object]:
    """Medians of each program, and the median of the rounds' ratios."""
    names = {
        "ours": f"ours {outtype}",
        "ours_without_fsync": f"no fsync {outtype}",
        "rival": f"rival {RIVAL_OUTTYPE[outtype]}",
    }
    ratios = {
        f"rival_over_{key}": statistics.median(
            r[names["rival"]].seconds / r[names[key]].seconds for r in rounds
        )
        for key in ("ours", "ours_without_fsync")
    }
    medians = {key: _median([r[name] for r in rounds]) for key, name in names.items()}
    return {"rival_outtype": RIVAL_OUTTYPE[outtype], **_rounded(ratios), **medians}


def _median(runs: list[ConversionRun]) -> dict[str, float]:
    columns = [asdict(run) for run in runs]
    return _rounded({key: statistics.median(c[key] for c in columns) for key in columns[0]})


def _rounded(values: dict[str, float]) -> dict[str, float]:
    return {key: round(value, 2) for key, value in values.items()}


def _count_equal(rival: Path, checkpoint: Path, outtype: str) -> int:
    """The number of tensors in a file; checks that each is the same in both files."""
    _watch(_rival_command(rival, checkpoint, outtype))
    options = [*_our_options(checkpoint, outtype), "--layout", "stock"]
    _watch([sys.executable, "-m", "hotsplit", *options])
    theirs, ours = (
        {tensor.name: tensor for tensor in GGUFReader(checkpoint.parent / name).tensors}
        for name in ("rival.gguf", "ours.gguf")
    )
    assert theirs.keys() == ours.keys(), sorted(theirs.keys() ^ ours.keys())
    for name, tensor in theirs.items():
        assert tensor.tensor_type == ours[name].tensor_type, name
        assert np.array_equal(tensor.data, ours[name].data), name
    return len(ours)


if __name__ == "__main__":
    main()
