"""The capabilities of an engine, in the order in which they are installed: the only list of them.

One more is a class with the hooks that it needs (`capability.py`) and a line here.
"""

from __future__ import annotations

from tokenmill.startup.assembly.adapters import Adapters
from tokenmill.startup.assembly.capability import Capability
from tokenmill.startup.assembly.encoder_outputs import EncoderOutputs
from tokenmill.startup.assembly.encoders import Encoders
from tokenmill.startup.assembly.grammars import Grammars
from tokenmill.startup.assembly.kv_metrics import KVMetrics
from tokenmill.startup.assembly.kv_transfer import KVEvents, KVTransfers
from tokenmill.startup.assembly.media import Images, Sound
from tokenmill.startup.assembly.partial_hits import PartialHits
from tokenmill.startup.assembly.pooling import Pooling
from tokenmill.startup.assembly.prompt_progress import PromptsInProgress
from tokenmill.startup.assembly.recurrent_states import RecurrentStates
from tokenmill.startup.assembly.sleep import Sleep
from tokenmill.startup.assembly.speculation import Speculation
from tokenmill.startup.assembly.windows import Windows

CAPABILITIES: tuple[type[Capability], ...] = (
    Grammars,  # outputs that follow a schema, a regex or a grammar
    Adapters,  # LoRA
    Images,  # prompts with images
    Sound,  # prompts with sound
    EncoderOutputs,  # what images and sound are encoded to: shared with other engines, made by servers for that
    Pooling,  # vectors and scores in the place of continuations
    Encoders,  # models without KV: a request is whole in a step
    RecurrentStates,  # layers with a state instead of KV
    Windows,  # layers that attend to the last tokens only
    Speculation,  # drafts: by n-grams, by a suffix tree, by a draft model
    PartialHits,  # prompts that differ inside a large page begin there
    KVTransfers,  # KV on disk, in the host's memory, from plug-ins and other engines
    Sleep,  # the memory of KV is given back while nobody asks
    PromptsInProgress,  # how far the prompts of those that ask are computed
    KVMetrics,  # how long cached pages live, lie unused, and are used again
    KVEvents,  # what the prefix cache takes in and gives up, for routers outside
)
CHECKS = tuple(capability.check for capability in CAPABILITIES)
