"""Shards that a driver has handed to a worker and waits for: what the shard loop runs over, waiting for the next one.

Each stays until it is answered. So a loop that one shard has broken begins again with the others, as if they had just
been handed out; and a worker that ends leaves nobody waiting.
"""

import threading
from concurrent.futures import Future
from typing import Generic, TypeVar

AnswerT = TypeVar("AnswerT")


class Outstanding(Generic[AnswerT]):
    """Shards without an answer, in the order in which they came. Safe to use from several threads."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._answers: dict[int, Future[AnswerT]] = {}
        self._last_word: AnswerT | None = None

    def wait_for(self, shard: int) -> AnswerT:
        """Hand a shard in, and wait until it is answered."""
        answer: Future[AnswerT] = Future()
        with self._changed:
            if self._last_word is not None:
                return self._last_word
            self._answers[shard] = answer
            self._changed.notify_all()
        return answer.result()

    def answer(self, shard: int, answer: AnswerT) -> None:
        """Say what has become of a shard; once it has an answer, further ones are dropped."""
        with self._changed:
            waiting = self._answers.pop(shard, None)
        if waiting is not None:
            waiting.set_result(answer)

    def answer_all(self, answer: AnswerT) -> None:
        """Say the same of all that are here now."""
        for shard in self.shards():
            self.answer(shard, answer)

    def close(self, answer: AnswerT) -> None:
        """Passes end, and no further one begins; who comes later gets this answer, who waits is left to the loop."""
        with self._changed:
            self._last_word = answer
            self._changed.notify_all()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._last_word is not None

    def wait_for_work(self) -> bool:
        """Until there is a shard to make; False: there will be none."""
        with self._changed:
            self._changed.wait_for(lambda: self._answers or self.closed)
        return not self.closed

    def shards(self) -> tuple[int, ...]:
        """Without an answer."""
        with self._changed:
            return tuple(self._answers)

    def new_pass(self) -> "Pass[AnswerT]":
        """Iterate over them all, and over those that come."""
        return Pass(self)


class Pass(Generic[AnswerT]):
    """One iteration; it waits for the next shard until it is left, or all is closed.

    The thread that iterates may be another one than the one that leaves: a generator could not be closed by it.
    """

    def __init__(self, outstanding: Outstanding[AnswerT]) -> None:
        self._outstanding = outstanding
        self._given: set[Future[AnswerT]] = set()
        self._left = False

    def __iter__(self) -> "Pass[AnswerT]":
        return self

    def __next__(self) -> int:
        outstanding = self._outstanding
        with outstanding._changed:
            while not self._left and not outstanding.closed:
                for shard, answer in outstanding._answers.items():
                    if answer not in self._given:
                        self._given.add(answer)
                        return shard
                self._given.intersection_update(outstanding._answers.values())
                outstanding._changed.wait()
        raise StopIteration

    def leave(self) -> None:
        """Wake who waits for a shard: none will come."""
        with self._outstanding._changed:
            self._left = True
            self._outstanding._changed.notify_all()
