"""The doctor's findings, each of which is one line."""

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "note", "wrong"]


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
