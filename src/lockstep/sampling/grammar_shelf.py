"""`GrammarShelf`: grammars that are compiled on a thread of their own, beside the steps, and kept while there is room.

What it hands out does not depend on when it was compiled: a grammar that is not there any more is compiled again, where it is needed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from lockstep.sampling.grammar import Grammars, GrammarState, Vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher


class GrammarShelf:
    """load: makes the vocabulary, once it is needed. room: grammars that are kept."""

    def __init__(self, load: Callable[[], Vocabulary], room: int) -> None:
        self._load = load
        self._room = room
        self._grammars: Grammars | None = None
        self._vocab_size = 0
        self._kept: OrderedDict[str, LLMatcher] = OrderedDict()
        self._pending: dict[str, Future[LLMatcher]] = {}
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="lockstep-grammar")

    def prepare(self, key: str, source: str) -> None:
        """Begin to compile; `take_prepared` tells when it has been done."""
        kept = self._kept.get(key)
        if key not in self._pending:
            self._pending[key] = self._thread.submit(self._compile, source) if kept is None else _done(kept)

    @property
    def is_preparing(self) -> bool:
        return bool(self._pending)

    def take_prepared(self) -> list[tuple[str, str]]:
        """(key, why it does not compile or nothing), each once."""
        ended = [key for key, future in self._pending.items() if future.done()]
        return [(key, self._take(key)) for key in ended]

    def _take(self, key: str) -> str:
        try:
            self._keep(key, self._pending.pop(key).result())
        except ValueError as error:
            return str(error) or "no reason is known"
        except Exception as error:  # a library's mistake, or no memory: that is its requests' end, not the stage's
            return f"{type(error).__name__}: {error}"
        return ""

    def state_of(self, key: str, source: str) -> GrammarState:
        """A request's state at the beginning of this grammar. Raises ValueError if it does not compile."""
        matcher = self._kept.get(key)
        if matcher is None:
            matcher = self._thread.submit(self._compile, source).result()
            self._keep(key, matcher)
        self._kept.move_to_end(key)
        return GrammarState(matcher, self._vocab_size)

    def _keep(self, key: str, matcher: LLMatcher) -> None:
        self._kept[key] = matcher
        while len(self._kept) > self._room:
            self._kept.popitem(last=False)

    def _compile(self, source: str) -> LLMatcher:
        if self._grammars is None:
            vocabulary = self._load()
            self._vocab_size = len(vocabulary.tokens)
            self._grammars = Grammars(vocabulary)
        return self._grammars.compile(source)


def _done(matcher: LLMatcher) -> Future[LLMatcher]:
    future: Future[LLMatcher] = Future()
    future.set_result(matcher)
    return future
