"""List the messages for the successor of a dead text worker: all open requests and calls, suspects first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from tokenmill.core.messages import GenerateText, ToWorker
from tokenmill.core.part_messages import Retrial, Verdict
from tokenmill.serving.frontend.open_request import Call, OpenRequest


def messages_again(requests: Mapping[str, OpenRequest], calls: Iterable[Call], verdict: Verdict) -> list[ToWorker]:
    """Return the messages that these requests and calls came with, to be sent again.

    Args:
        requests: the text worker's requests, by their ids.
        verdict: the verdict of its death on the calls that it prepared.
    """
    resumed: dict[str, tuple[GenerateText, dict[str, list[list[int]]]]] = {}
    for request_id, request in requests.items():
        resumed.setdefault(request.prompt.ids[0], (request.prompt, {}))[1][request_id] = request.deltas
    messages: dict[str, ToWorker] = {
        first: msgspec.structs.replace(prompt, resumed=deltas) for first, (prompt, deltas) in resumed.items()
    }
    messages |= {call.message.id: call.message for call in calls}
    if not verdict.suspects:
        return list(messages.values())
    suspects = [one for one in verdict.suspects if one in messages]
    retrial = Retrial(suspects, ended=[one for one in verdict.suspects if one not in messages])
    return [retrial, *({one: messages[one] for one in suspects} | messages).values()]
