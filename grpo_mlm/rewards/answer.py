"""What a response's answer is. Training and validation, and every reward, use this one extractor.

The last box is the answer. Boxes offered side by side (`\\boxed{42} or \\boxed{43}`) are one answer that lists
them all, so that guessing twice does not pay. What stands inside a thinking block is not an answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?=\{|[^\s{\\])")
_CONNECTIVE = re.compile(
    r"(?:[\s,;.:/$*]|\\[()\[\]]|\\text\s*\{|\}|\b(?:or|and|either|maybe|perhaps|possibly|alternatively)\b)*"
)
# Possessive, so that a long run of blanks is read once; the greedy start finds the last marker of a line.
_MARKER = re.compile(r".*(?:####|\banswer(?:\s++is\b\s*+:?+|\s*+:))\s*+(?P<answer>\S.*)", re.IGNORECASE)


def final_text(response: str) -> str:
    """The response without its thinking: what follows the last `</think>`, and nothing of a block left open.

    The opening tag may stand in the prompt, so a closing tag alone ends a block too.
    """
    text = response.rpartition("</think>")[2]
    return text.partition("<think>")[0]


def boxed_answer(response: str) -> str | None:
    """Content of the last box of the final text; None without one, or when the text ends inside it."""
    text = final_text(response)
    run: list[str] = []  # the boxes side by side that end with the latest one
    end = 0
    for start, stop, content in _boxes(text):
        if content is None:
            return None
        if not _CONNECTIVE.fullmatch(text, end, start):
            run = []
        if not run or run[-1] != content:
            run.append(content)
        end = stop
    return ", ".join(run) if run else None


def answer_text(response: str) -> str:
    """The boxed answer where there is one, else the whole final text; stripped."""
    boxed = boxed_answer(response)
    return final_text(response).strip() if boxed is None else boxed


def marked_answer(response: str) -> str | None:
    """The boxed answer, or what follows the last `answer is`, `answer:` or `####`, or else the last line."""
    boxed = boxed_answer(response)
    if boxed is not None:
        return boxed
    lines = final_text(response).strip().splitlines()
    for line in reversed(lines):
        marked = _MARKER.match(line)
        if marked:
            return marked["answer"].strip()
    return lines[-1].strip() if lines else None


def _boxes(text: str) -> Iterator[tuple[int, int, str | None]]:
    """Outermost boxes in order: start, end, content (None for one that never closes, which is the last)."""
    position = 0
    while match := _BOX.search(text, position):
        opening = match.end()
        if text[opening] != "{":  # \boxed 5
            position = opening + 1
            yield match.start(), position, text[opening]
            continue
        closing = _closing_brace(text, opening)
        if closing is None:
            yield match.start(), len(text), None
            return
        content = text[opening + 1 : closing].strip()
        position = closing + 1
        yield match.start(), position, _unwrapped(content)


def _unwrapped(content: str) -> str:
    """The content of a box in a box. Three deep is a slip of the pen, more is nothing to answer for."""
    for _ in range(3):
        match = re.fullmatch(r"\\(?:boxed|fbox)\s*\{(.*)\}", content, re.DOTALL)
        if match is None:
            break
        content = match[1].strip()
    return content


def _closing_brace(text: str, opening: int) -> int | None:
    """Index of the brace that closes the one at `opening`; escaped braces are text."""
    depth = 0
    for brace in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, opening):
        if brace[0] == "{":
            depth += 1
        elif brace[0] == "}":
            depth -= 1
            if depth == 0:
                return brace.start()
    return None
