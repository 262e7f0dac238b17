"""How long the store takes and what goes wrong in it. Labels are closed lists."""

from enum import StrEnum
from time import perf_counter

from sqlalchemy import Executable

from router.metrics import Family, Spread

SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10)


class Act(StrEnum):
    """What takes time: a statement by its kind, the wait for the turn to write (SQLite has one writer), a commit."""

    SELECT = "select"
    INSERT = "insert"
    UPDATE = "update"
    DELETE = "delete"
    OTHER = "other"
    TURN = "turn"
    COMMIT = "commit"


class Trouble(StrEnum):
    """What goes wrong: the database is not there, has no space, or refuses."""

    LOST = "lost"
    FULL = "full"
    REFUSED = "refused"


_ACTS = {str(act): act for act in (Act.SELECT, Act.INSERT, Act.UPDATE, Act.DELETE)}


class Measures:
    """One store's."""

    def __init__(self) -> None:
        self.seconds = Spread("store_seconds", "Time the store took, by what it did.", SECONDS, "act")
        self.errors = Family("store_errors", "Errors of the store.", "kind")

    def families(self) -> tuple[Family, ...]:
        """What a scrape shows."""
        return self.seconds, self.errors

    def since(self, began: float, act: Act) -> None:
        """Something that began at `began`, by `perf_counter`, is done."""
        self.seconds.see(perf_counter() - began, (act,))


def act_of(statement: Executable) -> Act:
    """What a statement does."""
    return _ACTS.get(getattr(statement, "__visit_name__", ""), Act.OTHER)
