"""Notes in a store that is slow, breaks, or is another one than it was."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from lowcomm import elastic_store
from lowcomm.comm.notes import KeyValueStore, Notes
from lowcomm.comm.transport import CommError
from tests.harness import in_threads


class Kept:
    """A store in this process. `slow_s`: how long it takes to answer; `is_broken`: whether its connection is gone."""

    def __init__(self, slow_s: float = 0.0):
        self.texts: dict[str, str] = {}
        self.slow_s, self.is_broken = slow_s, False

    def _answer(self) -> None:
        time.sleep(self.slow_s)
        if self.is_broken:
            raise RuntimeError("connection reset")

    def set(self, key: str, value: str) -> None:
        self._answer()
        self.texts[key] = value

    def get(self, key: str) -> bytes:
        self._answer()
        return self.texts[key].encode()

    def check(self, keys: list[str]) -> bool:
        self._answer()
        return all(key in self.texts for key in keys)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        self._answer()
        return self.texts.setdefault(key, desired).encode()


def with_another(within_s: float) -> tuple[Notes, Kept]:
    """Return notes, one of which is "there", and the store in which they are; another connection shows the same."""
    first, second = Kept(), Kept()
    second.texts = first.texts
    notes = Notes(first, within_s, connect=lambda: second)
    notes.write("there", "yes")
    return notes, first


def test_a_question_is_answered_while_another_is_under_way() -> None:
    notes = Notes(Kept(slow_s=0.02), 5.0)
    notes.write("there", "yes")

    def ask(key: str) -> list[str | None]:
        return [notes.look(key) for _ in range(10)]

    found, others = in_threads(lambda: ask("there"), lambda: ask("elsewhere"))
    assert found == ["yes"] * 10
    assert others == [""] * 10


@pytest.mark.fault("the connection to the store breaks", "another is made, and the store is asked over that")
def test_a_connection_that_breaks_is_made_anew() -> None:
    notes, first = with_another(5.0)
    first.is_broken = True
    assert notes.look("there") is None
    assert notes.look("there") == "yes"


@pytest.mark.fault(
    "a store of the membership is started anew, empty, in the place of the one that was",
    "it counts as no answer: nothing is written into another history",
)
def test_another_store_in_its_place_counts_as_none() -> None:
    first, second = Kept(), Kept()
    stores: list[KeyValueStore] = [second, second, first]
    notes = Notes(first, 5.0, connect=lambda: stores.pop(0))
    notes.write("there", "yes")
    first.is_broken = True
    assert [notes.look("there") for _ in range(3)] == [None] * 3
    first.is_broken = False
    assert notes.look("there") == "yes"
    assert "lowcomm/there" not in second.texts


@pytest.mark.fault("the store does not answer in time", "whoever asks goes on; it is asked over another connection")
def test_a_store_that_is_too_slow_is_asked_over_another_connection() -> None:
    notes, first = with_another(0.2)
    first.slow_s = 60.0
    begin = time.monotonic()
    assert notes.look("there") is None
    assert notes.look("there") == "yes"
    assert time.monotonic() - begin < 10


@pytest.mark.fault("a connection to the store takes longer to make than an answer", "it is made all the same, once")
def test_a_connection_that_takes_long_to_make_is_not_given_up_for_another() -> None:
    first, made = Kept(), []

    def connect() -> Kept:
        time.sleep(1.0)
        made.append(Kept())
        made[0].texts = first.texts
        return made[0]

    notes = Notes(first, 0.2, connect=connect)
    notes.write("there", "yes")
    first.is_broken = True
    until = time.monotonic() + 20
    while notes.look("there") != "yes":
        assert time.monotonic() < until
    assert len(made) == 1


def test_many_notes_are_had_at_once(store: Notes) -> None:
    notes = elastic_store(f"127.0.0.1:{store.port}")
    for i in range(5):
        notes.write(f"log/{i}", str(i))
    keys = [f"log/{i}" for i in range(6)]
    assert notes.look_all(keys[:5]) == ["0", "1", "2", "3", "4"]
    assert notes.look_all(keys) is None
    assert Notes(Kept(), 5.0).look_all(keys) is None  # one at a time, then


def test_who_closes_waits_for_what_is_under_way_and_asks_nothing_more() -> None:
    """A store's code that returns while the interpreter ends would abort the process, after all that it has done."""
    store, connecting = Kept(), threading.Event()

    def connect() -> Kept:
        connecting.set()
        time.sleep(2)  # longer than an answer may take
        raise RuntimeError("nobody there")

    notes = Notes(store, 0.5, connect=connect)
    notes.write("there", "yes")
    store.is_broken = True
    assert notes.look("there") is None
    asking = threading.Thread(target=notes.look, args=("there",))
    asking.start()
    assert connecting.wait(20)
    assert any(thread.is_alive() for thread in notes._threads)
    notes.close()
    asking.join()
    assert not any(thread.is_alive() for thread in notes._threads)
    assert notes.look("there") is None


def test_a_store_that_does_not_answer_is_waited_for_no_longer_than_asked() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # which takes connections, and says nothing
        begin = time.monotonic()
        with pytest.raises(CommError, match=r"no store of elastic replicas at 127.0.0.1:\d+"):
            elastic_store(f"127.0.0.1:{silent.getsockname()[1]}", timeout_s=1.0)
        assert time.monotonic() - begin < 20
