"""`Replanning`: the replanners of a pool, one for each model whose graphs follow its traffic."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.planning.replanner import Decision, Replanner


class Replanning:
    """Lets them take turns: no two workers of the pool change their graphs at once, whatever they encode with."""

    def __init__(self, replanners: Sequence[Replanner]) -> None:
        self.replanners = tuple(replanners)

    def tick(self) -> None:
        """Take each a step further, but while one changes workers only that one. Returns soon."""
        for replanner in [one for one in self.replanners if one.is_changing] or self.replanners:
            replanner.tick()
            if replanner.is_changing:
                return

    def decisions(self) -> tuple[Decision, ...]:
        """What each has decided last. From any thread."""
        return tuple(replanner.decision() for replanner in self.replanners)
