"""Fair shares of a full pool: who holds less than others comes before who holds more. No Ray, no torch.

While a client waits that was refused for want of room, the others get no more than an equal part each of what the pool
held when it was full. Nobody is held back where nobody waits or workers might be idle for it, and who holds
nothing may always try.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from cluster.routing.worker_view import NOTHING_MS

HUNGRY_S = 1.0  # after a refusal; clients come back within half a second
BUSY_MS = 250.0  # of work that a worker has whoever waits, or half a queue: some never come back
FEW_ACCOUNTS = 64


class Account:
    """What one client holds."""

    __slots__ = ("held_ms", "hungry_until_s")

    def __init__(self) -> None:
        self.held_ms = 0.0  # predicted GPU time of its leases
        self.hungry_until_s = -math.inf

    def counts(self, now_s: float) -> bool:
        """Whether it holds something or waits for it."""
        return self.held_ms > 0 or self.hungry_until_s > now_s

    def settle(self, cost_ms: float) -> None:
        """So much less is held."""
        self.held_ms -= cost_ms
        if self.held_ms < NOTHING_MS:  # a rounding error is no client
            self.held_ms = 0.0


class Shares:
    """Clients that ask for the same workers with the same priority. One thread at a time."""

    def __init__(self, now_s: Callable[[], float], num_workers: Callable[[], int]) -> None:
        self._now_s, self._num_workers = now_s, num_workers
        self._accounts: dict[str, Account] = {}
        self._most_accounts = FEW_ACCOUNTS  # until those of clients that are gone are looked for
        self._full_ms = 0.0  # what all held when somebody was refused
        self._hungry_until_s = -math.inf  # of all of them

    def account(self, client: str) -> Account:
        """Of this client; to be asked for at each call, for it is forgotten when it holds nothing."""
        account = self._accounts.get(client)
        if account is None:
            if len(self._accounts) >= self._most_accounts:
                now_s = self._now_s()
                self._accounts = {client: each for client, each in self._accounts.items() if each.counts(now_s)}
                self._most_accounts = max(FEW_ACCOUNTS, 2 * len(self._accounts))
            account = self._accounts[client] = Account()
        return account

    def room_ms(self, account: Account) -> float:
        """What it may hold more, as predicted GPU time: endless unless another client waits for room."""
        now_s = self._now_s()
        if now_s >= self._hungry_until_s:
            return math.inf
        active = [each for each in self._accounts.values() if each.counts(now_s)]
        if all(each is account or each.hungry_until_s <= now_s for each in active):
            return math.inf
        share_ms = self._full_ms / len(active)
        own_ms = share_ms - account.held_ms if account.held_ms > 0 else max(share_ms, NOTHING_MS)
        busy_ms = min(BUSY_MS * self._num_workers(), self._full_ms / 2)
        return max(own_ms, busy_ms - sum(each.held_ms for each in active))

    def refused(self, account: Account) -> None:
        """There was no room for something of it, wherever it might have gone."""
        now_s = self._now_s()
        if now_s >= self._hungry_until_s:
            self._full_ms = 0.0
        account.hungry_until_s = self._hungry_until_s = now_s + HUNGRY_S
        # The most of the while: what is held falls as work ends, and shares that fell with it would leave workers idle.
        self._full_ms = max(self._full_ms, sum(each.held_ms for each in self._accounts.values()))
