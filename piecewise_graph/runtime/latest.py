"""Latest: what was met before, as far as it is worth knowing."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from threading import Lock


class Latest:
    """Remembers the latest `most` keys that it met; several threads may ask."""

    def __init__(self, most: int) -> None:
        self._most, self._lock = most, Lock()
        self._keys: OrderedDict[Hashable, None] = OrderedDict()

    def meet(self, key: Hashable) -> bool:
        """Remember `key`; whether it was met before."""
        with self._lock:
            before = key in self._keys
            self._keys[key] = None
            self._keys.move_to_end(key)
            if len(self._keys) > self._most:
                self._keys.popitem(last=False)
        return before
