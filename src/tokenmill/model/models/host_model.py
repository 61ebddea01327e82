"""Choose how a decoder runs on the CPU: in one native call a step, or in torch. Imports torch only for the latter."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tokenmill.model.models.native_decoder import (
    NATIVE_ATTENTION,
    NativeDecoder,
    native_groups,
    native_pass_obstacle,
)

if TYPE_CHECKING:
    from tokenmill.model.attention.protocol import AttentionBackend
    from tokenmill.model.kernels.protocol import Kernels
    from tokenmill.model.kernels.states import KeptInputs, StateMemory, StateRows
    from tokenmill.model.models.decoder import Decoder
    from tokenmill.model.models.host_decoder import HostDecoder


def on_host(decoder: Decoder, attention: AttentionBackend) -> NativeDecoder | HostDecoder:
    """Return a decoder's model over arrays: each pass is one native call if nothing prevents that."""
    if native_groups(attention) is not None and native_pass_obstacle(decoder, NATIVE_ATTENTION) is None:
        return NativeDecoder(decoder, attention)
    from tokenmill.model.models.host_decoder import HostDecoder

    return HostDecoder(decoder)


def replay_on_host(decoder: Decoder, kernels: Kernels) -> Callable[[StateMemory, KeptInputs, StateRows], None]:
    """Return `Decoder.replay` over the host's arrays, with the decoder's kernels."""
    if kernels.name == "native":
        return decoder.replay
    from tokenmill.model.models.host_decoder import HostDecoder

    return HostDecoder(decoder).replay
