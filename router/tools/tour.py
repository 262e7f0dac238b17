"""What `ebbtide demo` shows: a chat, two documents with chats beside them, a document that makes way for a chat on the
node both share, then who went where and why.

Rules: what is shown was measured in this run; documents are made up from a rule, so every run asks the same.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from router.tools.ask import Answered, ask

#: Days in the logs that are to be summarised, by brevity: about 1,500 tokens, which keep the slot busy, and then 4,000
#: which wait; 1,100 each when brief, little over what makes a document long.
LENGTHS = {False: (48, 114), True: (31, 31)}
#: Added to the model's name by the node that serves both kinds of work.
SHARED = "-shared"
#: Days in the log that is taken back, by brevity: some 2,000 tokens, or 1,100.
SHARED_LENGTHS = {False: 57, True: 31}
#: So long the document is read before the chat comes.
HEAD_START_S = 3.0
#: A pause between chats, as a person's.
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


def tour(console: Console, port: int, model: str, *, brief: bool = False) -> None:
    """Ask the router at `port` and tell what happened; `brief` with shorter documents.

    Raises EbbtideError when an answer fails.
    """
    first = _first_chat(console, port, model)
    threads = ThreadPoolExecutor(max_workers=2)
    try:
        documents, chats = _documents_and_chats(
            console, threads, lambda text, tokens: ask(port, _chat(model, text, tokens)), LENGTHS[brief]
        )
        shared = _shared(
            console, threads, lambda text, tokens: ask(port, _chat(model + SHARED, text, tokens)), SHARED_LENGTHS[brief]
        )
    finally:
        # not waited for: after an interrupt the nodes end first, and with them the questions
        threads.shutdown(wait=False, cancel_futures=True)
    chats.sort(key=lambda answer: answer.first_s)
    count, middle, slowest = len(chats), chats[len(chats) // 2], chats[-1]
    rows = [
        Asked("chat, alone", first),
        *documents,
        Asked(f"{count} chats beside, middle", middle),
        Asked(f"{count} chats beside, slowest", slowest),
        *shared,
    ]
    console.print("[bold]4. What went where, and why[/bold]")
    console.print(_table(rows))


def _first_chat(console: Console, port: int, model: str) -> Answered:
    console.print("\n[bold]1. A chat.[/bold] Short and streamed: interactive, and started at once.")
    console.print(f"   > {QUESTIONS[0]}")
    answer = ask(port, _chat(model, QUESTIONS[0], tokens=60), lambda piece: console.print(Text(piece), end=""))
    speed = answer.pieces / max(answer.whole_s - answer.first_s, 0.001)
    console.print(f"\n   [dim]first token after {answer.first_s:.2f} s, then {speed:.0f} tokens a second[/dim]\n")
    return answer


def _documents_and_chats(
    console: Console, threads: ThreadPoolExecutor, say: Callable[[str, int], Answered], days: tuple[int, int]
) -> tuple[list[Asked], list[Answered]]:
    """Two documents, and chats for as long as they take; at least one. `say` asks for so many tokens at most."""
    console.print("[bold]2. Two documents.[/bold] Long: batch, and sent to the long node, which has one slot.")
    console.print("   The second waits its turn in the router; chats go on beside both.")
    documents = [threads.submit(say, _log("north quay", days[0]), 32)]
    chats = [say(QUESTIONS[1], 24)]
    documents.append(threads.submit(say, _log("south quay", days[1]), 32))
    started = time.monotonic()
    with console.status("") as status:
        while not all(document.done() for document in documents):
            status.update(_progress(documents, len(chats), time.monotonic() - started))
            chats.append(say(QUESTIONS[1 + len(chats) % (len(QUESTIONS) - 1)], 24))
            time.sleep(CHAT_PAUSE_S)
    first, second = (document.result() for document in documents)
    console.print(f"   [dim]both done after {max(first.whole_s, second.whole_s):.0f} s[/dim]\n")
    return [Asked("first document", first), Asked("second document", second)], chats


def _shared(
    console: Console, threads: ThreadPoolExecutor, say: Callable[[str, int], Answered], days: int
) -> list[Asked]:
    """A document on a node that serves both kinds of work, and a chat that comes while it is read."""
    console.print("[bold]3. One node for both.[/bold] A document is being read on it when a chat comes.")
    console.print("   The router takes the document's place back, answers the chat, and sends the document again.")
    say(QUESTIONS[1], 8)
    document = threads.submit(say, _log("east quay", days), 16)
    with console.status("the document is being read"):
        time.sleep(HEAD_START_S)
        chat = say(QUESTIONS[4], 24)
        console.print(f"   [dim]the chat's first token came after {chat.first_s:.2f} s[/dim]")
        answer = document.result()
    console.print(f"   [dim]the document was done after {answer.whole_s:.0f} s[/dim]\n")
    return [Asked("document on the shared node", answer), Asked("chat that came while it was read", chat)]


def _progress(documents: list[Future[Answered]], chats: int, seconds: float) -> str:
    done = sum(document.done() for document in documents)
    return f"{seconds:.0f} s: {done} of 2 documents done, {chats} chats answered beside them"


def _table(rows: list[Asked]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    for name in ("", "workload", "reason", "node"):
        table.add_column(name, no_wrap=True)
    for name in ("queued", "first token"):
        table.add_column(name, justify="right", no_wrap=True)
    for what, answer in rows:
        told = (answer.headers.get(f"x-ebbtide-{name}", "?") for name in ("workload", "reason", "node"))
        times = (f"{seconds:.2f} s" for seconds in (answer.queued_s, answer.first_s))
        table.add_row(what, *told, *times)
    return table


def _chat(model: str, question: str, tokens: int) -> dict[str, object]:
    return {"model": model, "messages": [{"role": "user", "content": question}], "max_tokens": tokens}


def _log(place: str, days: int) -> str:
    """A harbour's log with the wish to have it summarised; about 35 tokens a day."""
    text = "\n".join(_day(place, day) for day in range(1, days + 1))
    return f"Log of the {place}.\n{text}\n\nSummarise this log in two sentences."


def _day(place: str, day: int) -> str:
    boats, wind, height = 2 + day * 7 % 11, 1 + day * 5 % 8, 40 + day * 13 % 60
    return f"Day {day}: low water {height} cm, wind south-west {wind}, {boats} boats at the {place}, all quiet."
