"""Progress if stderr is not a terminal."""

from sparkinfer import progress as module
from sparkinfer.progress import progress


def test_a_log_gets_only_a_few_lines(capsys, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    with progress("counting", 1000, "tokens") as advance:
        for _ in range(10):
            clock[0] += 10
            advance(50)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("counting: 150 tokens of 1,000 (15%), ")
    assert lines[0].endswith(" s left")
    with progress("counting", None, "tokens") as advance:
        advance(5)
    assert capsys.readouterr().err == ""
