"""Tokens of one answer as text that only grows: for streams, stop strings, and log-probabilities per token."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

UNFINISHED = "\ufffd"  # what a tokenizer shows of a character whose bytes are not all there
CONTEXT = 6  # tokens before the new ones that are decoded with them, since the text of a token may depend on them
MOST_UNFINISHED = 8  # tokens that wait for the rest of a character, which has four bytes at most


@dataclass(frozen=True, slots=True)
class TokenText:
    token_id: int
    text: str  # of the token alone
    logprob: float
    offset: int  # characters of the answer before it


class AnswerText:
    """`silent`: tokens that end an answer and are no part of its text. `stops`: texts at which it ends, before them."""

    def __init__(self, tokenizer: Any, silent: Collection[int], stops: Sequence[str] = ()) -> None:
        self._tokenizer, self._silent, self._stops = tokenizer, frozenset(silent), tuple(stops)
        self._ids: list[int] = []
        self._decoded = 0  # ids that are in the text
        self._text = ""
        self._given = 0  # characters that `fresh` has given
        self.stopped = False  # one of `stops` was found

    @property
    def text(self) -> str:
        return self._text

    def push(self, token_id: int, logprob: float) -> TokenText:
        """One more token. None must follow when `stopped`."""
        offset = len(self._text)
        if token_id not in self._silent:
            self._ids.append(token_id)
            self._grow(self._unread(), final=False)
        return TokenText(token_id, self._decode([token_id]), logprob, offset)

    def fresh(self, final: bool) -> str:
        """Text since the last call, without what may still turn out to be the beginning of a stop string. `final`: no
        token follows."""
        if final and not self.stopped:
            self._grow(self._unread(), final=True)
        end = len(self._text) if final or self.stopped else len(self._text) - self._begun_stop()
        new = self._text[self._given : end]
        self._given += len(new)
        return new

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _unread(self) -> str:
        """What the ids that are not in the text yet add to it."""
        before = self._ids[max(0, self._decoded - CONTEXT) : self._decoded]
        return self._decode(before + self._ids[self._decoded :])[len(self._decode(before)) :]

    def _grow(self, new: str, final: bool) -> None:
        waits = not new or (new.endswith(UNFINISHED) and len(self._ids) - self._decoded < MOST_UNFINISHED)
        if waits and not final:
            return
        self._decoded = len(self._ids)
        begin = len(self._text) - max(map(len, self._stops), default=1) + 1
        self._text += new
        found = [at for stop in self._stops if (at := self._text.find(stop, max(0, begin))) >= 0]
        if found:
            self._text, self.stopped = self._text[: min(found)], True

    def _begun_stop(self) -> int:
        """Length of the longest end of the text with which a stop string begins."""
        longest = max(map(len, self._stops), default=1) - 1
        for length in range(min(longest, len(self._text)), 0, -1):
            if any(stop.startswith(self._text[-length:]) for stop in self._stops):
                return length
        return 0
