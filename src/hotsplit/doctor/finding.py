"""The doctor's findings as lines, and as a report for an issue, which has neither paths nor the
names of the user and the machine."""

import getpass
import os
import re
import socket
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

State = Literal["ok", "note", "wrong"]
# The file name of a library or module at the end of a path, and what follows the path.
_LIBRARY = re.compile(r"[/\\]([\w+.-]+\.(?:so[\d.]*|py))\.?(?=\s|$)(.*)")
# A path with at least one name, as opposed to the slash of a fraction or of "and/or". A path may
# contain spaces, so everything up to a quote, comma, colon, semicolon, bracket or the advice counts
# as part of it; text in brackets counts, too, if the path goes on after it.
_PATH = re.compile(
    r"(?<![\w.)\]])(?:[A-Za-z]:|~\w*|\.{1,2})?[/\\](?!\s)"
    r"(?:(?! -> )[^'\",;:()\[\]\n]|[(\[][^()\[\]/]*[)\]](?=[^\s/]*/))+"
)
# A path in single quotes, which may contain any other character.
_QUOTED = re.compile(r"(?<=')(?:[A-Za-z]:|~\w*|\.{1,2})?[/\\][^']+(?=')")
HIDDEN = "(hidden)"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line: its subject, its state, its text, and what to do about it, if anything."""

    about: str
    state: State
    text: str
    advice: str = ""

    @property
    def line(self) -> str:
        advice = f" -> {self.advice}" if self.advice else ""
        line = f"{self.state:5} {self.about}: {self.text}{advice}"
        # An error's text may contain terminal escape codes.
        return "".join(letter if letter.isprintable() else "?" for letter in line)


def ok(about: str, text: str) -> Finding:
    return Finding(about=about, state="ok", text=text)


def note(about: str, text: str, advice: str = "") -> Finding:
    return Finding(about=about, state="note", text=text, advice=advice)


def wrong(about: str, text: str, advice: str) -> Finding:
    return Finding(about=about, state="wrong", text=text, advice=advice)


def report_of(findings: Sequence[Finding]) -> str:
    """The findings as a text for an issue."""
    lines = [scrubbed(finding.line) for finding in findings]
    return "\n".join(["hotsplit doctor", "", *lines, ""])


def scrubbed(text: str) -> str:
    """The text without paths (except the file names of libraries and modules) and without the names
    of the user and the machine."""
    for folder in sorted(_folders(), key=len, reverse=True):
        text = text.replace(folder, "/hidden")  # else one that ends in ".py" would be shown
    text = _PATH.sub(_last_name, _QUOTED.sub(_last_name, text))
    for name in sorted(_names(), key=len, reverse=True):
        text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", HIDDEN, text)
    return text


def _last_name(path: re.Match[str]) -> str:
    """The name of the library or module at the path's end, or HIDDEN, with the words after it."""
    found = _LIBRARY.search(path[0])
    return HIDDEN if found is None else found[1] + _PATH.sub(_last_name, found[2])


def _folders() -> set[str]:
    """Folders that are replaced as plain text, since their names may contain characters at which
    _PATH stops."""
    known = [Path.cwd(), Path(tempfile.gettempdir()), Path(sys.prefix), Path(sys.base_prefix)]
    with suppress(RuntimeError):
        known.append(Path.home())
    return {str(path) for path in known if len(path.parts) > 1}


def _names() -> set[str]:
    host = socket.gethostname()
    found = {host, host.partition(".")[0]}
    with suppress(OSError, KeyError, RuntimeError):  # a user without a passwd entry
        found |= {getpass.getuser(), Path.home().name}
    found |= {os.environ.get(name, "") for name in ("USER", "LOGNAME", "USERNAME", "HOSTNAME")}
    return {name for name in found if len(name) > 1}
