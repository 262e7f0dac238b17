"""What `ebbtide demo` shows: a chat, then two documents with chats beside them, then who went where and why.

Rules: what is shown is what was measured in this run; documents are made up from a rule, so every run asks the same.
"""

import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from router.tools.ask import Answered, ask

#: A day of the log the documents are made of is about 37 tokens.
LONG_DAYS, SHORT_DAYS = 84, 46
CHAT_PAUSE_S = 1.0
QUESTIONS = (
    "What makes the tide come in and go out?",
    "Name two animals that live in a rock pool.",
    "Why is sea water salty?",
    "What is a harbour master's work?",
    "How does a lighthouse help a ship?",
)


class Asked(NamedTuple):
    """One row of the closing table."""

    what: str
    answer: Answered


def tour(console: Console, port: int, model: str) -> None:
    """Ask the router at `port` and tell what happened. Raises EbbtideError when an answer fails."""
    first = _first_chat(console, port, model)
    pool = ThreadPoolExecutor(max_workers=2)
    try:
        rows = [first, *_documents_and_chats(console, pool, port, model)]
    finally:
        # not waited for: after an interrupt the nodes end first, and with them the questions
        pool.shutdown(wait=False, cancel_futures=True)
    console.print(_table(rows))
    beside = [row.answer.first_s for row in rows[1:] if row.answer.headers.get("x-ebbtide-workload") == "interactive"]
    if beside:
        console.print(f"While the documents were worked on, {len(beside)} chats were answered beside them;")
        console.print(f"the slowest first word took {max(beside):.2f} s (alone: {first.answer.first_s:.2f} s).\n")


def _first_chat(console: Console, port: int, model: str) -> Asked:
    question = QUESTIONS[0]
    console.print(f"\n[bold]1. A chat.[/bold] Short and streamed, so it is interactive and starts at once.\n   > {question}")
    answer = ask(port, _chat(model, question), lambda piece: console.print(Text(piece), end=""))
    speed = answer.pieces / max(answer.whole_s - answer.first_s, 0.001)
    console.print(f"\n   [dim]first word after {answer.first_s:.2f} s, then {speed:.0f} words or parts a second[/dim]\n")
    return Asked("chat", answer)


def _documents_and_chats(console: Console, pool: ThreadPoolExecutor, port: int, model: str) -> list[Asked]:
    console.print("[bold]2. Two documents.[/bold] Over 1,500 tokens, so they are batch: they go to the long node, which has")
    console.print("   one slot. The second waits its turn in the router, and chats go on beside both.")
    documents = [
        pool.submit(ask, port, _document(model, "north quay", LONG_DAYS)),
        pool.submit(ask, port, _document(model, "south quay", SHORT_DAYS)),
    ]
    chats: list[Asked] = []
    started = time.monotonic()
    with console.status("") as status:
        while not all(document.done() for document in documents):
            status.update(_progress(documents, len(chats), time.monotonic() - started))
            question = QUESTIONS[(len(chats) + 1) % len(QUESTIONS)]
            chats.append(Asked("chat beside", ask(port, _chat(model, question, tokens=24))))
            time.sleep(CHAT_PAUSE_S)
    long, short = (document.result() for document in documents)
    return [Asked("long document", long), Asked("second document", short), *chats]


def _progress(documents: list[Future[Answered]], chats: int, seconds: float) -> str:
    done = sum(document.done() for document in documents)
    return f"{done} of 2 documents done after {seconds:.0f} s; {chats} chats answered meanwhile"


def _table(rows: list[Asked]) -> Table:
    table = Table(title="\n3. What went where, and why", title_justify="left", title_style="bold")
    for name in ("call", "workload", "told by", "node"):
        table.add_column(name)
    for name in ("queued", "first word", "whole"):
        table.add_column(name, justify="right")
    for what, answer in rows:
        told = (answer.headers.get(f"x-ebbtide-{name}", "?") for name in ("workload", "reason", "node"))
        times = (f"{seconds:.2f} s" for seconds in (answer.queued_s, answer.first_s, answer.whole_s))
        table.add_row(what, *told, *times)
    return table


def _chat(model: str, question: str, tokens: int = 60) -> dict[str, object]:
    return {"model": model, "messages": [{"role": "user", "content": question}], "max_tokens": tokens}


def _document(model: str, place: str, days: int) -> dict[str, object]:
    text = "\n".join(_day(place, day) for day in range(1, days + 1))
    return _chat(model, f"Log of the {place}.\n{text}\n\nSummarise this log in two sentences.", tokens=40)


def _day(place: str, day: int) -> str:
    boats, wind, height = 2 + day * 7 % 11, 1 + day * 5 % 8, 40 + day * 13 % 60
    return f"Day {day}: low water {height} cm, wind south-west {wind}, {boats} boats at the {place}, nothing else to tell."
