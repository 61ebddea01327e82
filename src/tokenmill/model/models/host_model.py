"""Choose how a decoder runs on the CPU: in one native call a step, or in torch. Imports torch only for the latter."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenmill.model.models.native_decoder import (
    NATIVE_ATTENTION,
    NativeDecoder,
    native_groups,
    native_pass_obstacle,
)

if TYPE_CHECKING:
    from tokenmill.model.attention.protocol import AttentionBackend
    from tokenmill.model.models.decoder import Decoder
    from tokenmill.model.models.host_decoder import HostDecoder


def on_host(decoder: Decoder, attention: AttentionBackend) -> NativeDecoder | HostDecoder:
    """Return a decoder's model over arrays: each pass is one native call if nothing prevents that."""
    if native_groups(attention) is not None and native_pass_obstacle(decoder, NATIVE_ATTENTION) is None:
        return NativeDecoder(decoder, attention)
    from tokenmill.model.models.host_decoder import HostDecoder

    return HostDecoder(decoder)
