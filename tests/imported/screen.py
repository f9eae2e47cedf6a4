"""What a terminal or a notebook shows of a text in which lines are overwritten."""

import re


def screen(written: str) -> list[str]:
    """The lines, without colours: after a carriage return the next characters replace those from the line's start."""
    lines = []
    for line in re.sub(r"\x1b\[[\d;]*m", "", written).split("\n"):
        shown = ""
        for part in line.split("\r"):
            shown = part + shown[len(part) :]
        lines.append(shown.rstrip())
    return lines
