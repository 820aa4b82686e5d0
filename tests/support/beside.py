"""What goes on beside a test, again and again, on a thread of its own."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def again_and_again(act: Callable[[], None], pause_s: float = 0.0) -> Iterator[None]:
    is_over = threading.Event()

    def go_on() -> None:
        while not is_over.wait(pause_s):
            act()

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
