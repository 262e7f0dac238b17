"""What a caller is told that nobody will answer."""

from router.core.call import Call
from router.core.placement import Refuse, RefuseReason
from router.errors import (
    Answer,
    ContextTooLong,
    ModelNotFound,
    NotFound,
    Overloaded,
    RequestTimeout,
    UpstreamUnavailable,
)

__all__ = ["refusal"]


def refusal(call: Call, decision: Refuse, retry_after_s: int) -> Answer:
    """The answer for a call that is refused, when asking again after `retry_after_s` seconds may help."""
    reason, context = decision.reason, decision.context
    match reason:
        case RefuseReason.UNKNOWN_MODEL:
            message = f"The model `{call.model}` does not exist or you do not have access to it."
            return ModelNotFound(message, param="model")
        case RefuseReason.CONTEXT:
            message = (
                f"This model's maximum context length is {context} tokens. However, your prompt contains about"
                f" {call.prompt_tokens} tokens. Please reduce the length of the prompt."
            )
            return ContextTooLong(message, param=call.endpoint.prompt_field)
        case RefuseReason.OWNER_GONE:
            return NotFound("The node that holds this response is gone.", param="response_id")
        case RefuseReason.DEADLINE:
            return RequestTimeout("No room came before the client's own deadline.", retry_after_s=1)
        case RefuseReason.NODE_FAILED:
            return UpstreamUnavailable("Every node that serves this model failed.")
        case RefuseReason.NODES_DOWN | RefuseReason.NO_ROOM:
            why = "No node is up" if reason is RefuseReason.NODES_DOWN else "No node has room"
            return Overloaded(f"{why} for this model; try again later.", retry_after_s=retry_after_s)
