"""Tells a call's workload, strongest sign first.

    header                the caller's X-Ebbtide-Workload
    key                   the fixed class of its API key
    job                   it is a line of a batch
    background            `background: true`, or a completion_window of 2h or 8h
    tier                  service_tier flex -> batch; priority, fast, ultrafast -> interactive
    size                  more prompt tokens than `long_prompt_tokens`
    context               no room in the context of any interactive node
    stream                somebody reads along
    default               interactive: a wait somebody did not expect is worse than speed nobody needed

`told` looks at what was said, which needs no count; `classify` goes on to guess.
"""

from router.core.body import Body
from router.core.call import INTERACTIVE, Reason, Workload
from router.errors import BadRequest

__all__ = ["HEADER", "classify", "told"]

HEADER = "X-Ebbtide-Workload"
_WORKLOADS = {workload.value: workload for workload in Workload}
_BY_STREAM = INTERACTIVE, Reason.STREAM
_BY_DEFAULT = INTERACTIVE, Reason.DEFAULT
_PATIENT_WINDOWS = frozenset(("2h", "8h"))
_TIERS = {
    "flex": Workload.BATCH,
    "priority": Workload.INTERACTIVE,
    "fast": Workload.INTERACTIVE,
    "ultrafast": Workload.INTERACTIVE,
}


def classify(  # noqa: PLR0913  # one keyword for each sign
    *,
    header: str | None,
    key_class: Workload | None,
    job: bool = False,
    body: Body,
    prompt_tokens: int,
    long_prompt_tokens: int,
    interactive_context: int | None,
) -> tuple[Workload, Reason]:
    """The workload of a call and what told it.

    `interactive_context` is the longest context, in tokens, of the nodes of the interactive pool that serve the model;
    None when there is none or it is not known. Raises BadRequest for a header that names no workload.
    """
    if header is not None or key_class is not None or job or body.stated:
        said = told(header=header, key_class=key_class, job=job, body=body)
        if said is not None:
            return said
    if prompt_tokens > long_prompt_tokens:
        return Workload.BATCH, Reason.SIZE
    if interactive_context is not None and prompt_tokens >= interactive_context:
        return Workload.BATCH, Reason.CONTEXT
    return _BY_STREAM if body.stream else _BY_DEFAULT


def told(*, header: str | None, key_class: Workload | None, job: bool, body: Body) -> tuple[Workload, Reason] | None:
    """The workload somebody stated, or None. Raises BadRequest for a header that names no workload."""
    if header is not None:
        return _named(header), Reason.HEADER
    if key_class is not None:
        return key_class, Reason.KEY
    if job:
        return Workload.BATCH, Reason.JOB
    if body.background or body.completion_window in _PATIENT_WINDOWS:
        return Workload.BATCH, Reason.BACKGROUND
    tier = _TIERS.get(body.service_tier or "")
    return None if tier is None else (tier, Reason.TIER)


def _named(header: str) -> Workload:
    workload = _WORKLOADS.get(header.strip().lower())
    if workload is None:
        allowed = " or ".join(f"'{name}'" for name in _WORKLOADS)
        raise BadRequest(
            f"Invalid value for the header '{HEADER}': write {allowed}.", param=HEADER, code="invalid_value"
        )
    return workload
