"""Connect an engine to its KV sources: make them from the config, and set up the connector between them and the engine.

Two tiers come with TokenMill: a disk that outlives the engine, and the host's memory for the pages of a GPU. Users
bring others, found by the name of an entry point or by `module:name`.
"""

from __future__ import annotations

import errno
import logging
import shutil
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec

from tokenmill.config.configs import EngineConfig
from tokenmill.config.kv_transfer import FLAG, SOURCE_PLUGINS, OwnConnector, parse_kv_transfer_config
from tokenmill.core.errors import InvalidConfig
from tokenmill.core.plugins import find_plugin
from tokenmill.core.transfers import KVQuery, TransferSettings
from tokenmill.engine.scheduler.scheduler import EngineScheduler
from tokenmill.engine.transfer.connector import KVConnector, TransferTimeouts
from tokenmill.engine.transfer.orders import Movers, PageMover
from tokenmill.engine.transfer.page_mover import RawPages, layout_of
from tokenmill.engine.transfer.protocol import Answer, KVSource, SourceContext
from tokenmill.engine.transfer.session_file import SessionForm
from tokenmill.engine.transfer.sessions import SessionFiles, SlotActions
from tokenmill.engine.transfer.slot_file import SlotFile
from tokenmill.engine.transfer.slot_format import VERSION, SlotFormat
from tokenmill.engine.transfer.slot_table import PrefixTables, SharedTable, SlotTable
from tokenmill.engine.transfer.slots import SlotMemory
from tokenmill.engine.transfer.state import TransferState
from tokenmill.engine.transfer.tier import Tier
from tokenmill.platform.protocol import Platform

if TYPE_CHECKING:
    from tokenmill.engine.loop.step_log import LogHeader
    from tokenmill.platform.arrays import Array
    from tokenmill.startup.assembly.memory import StepMemory

logger = logging.getLogger(__name__)

# Unless the user says how much: a fifth of what the disk has left, and this at most.
SHARE, MOST_BYTES = 5, 50 << 30


class Connection(msgspec.Struct, frozen=True):
    """The sources of an engine.

    Attributes:
        movers: of the pages and states that the sources fill and read.
        policy: what happens to a request whose load fails.
        timeouts: how long an outside source may take.
        takes_params: clients may send parameters to these sources.
    """

    sources: tuple[KVSource, ...]
    movers: Movers
    policy: str
    timeouts: TransferTimeouts
    takes_params: bool

    def with_settings(self, header: LogHeader) -> LogHeader:
        """Return the header with the settings of the sources that a scheduler needs."""
        stores = tuple(source.name for source in self.sources if source.stores)
        return msgspec.structs.replace(header, transfers=TransferSettings(stores))

    def slot_actions(self, config: EngineConfig, scheduler: EngineScheduler) -> list[SlotActions]:
        """Return the extension by which operators save and restore conversations, if there are files for them."""
        state = scheduler.resource(TransferState)
        files = next((source for source in self.sources if isinstance(source, SessionFiles)), None)
        if files is None or state is None:
            return []
        actions = SlotActions(
            files, Path(config.slot_save_path or "").expanduser(), config.max_num_seqs, config.page_size
        )
        state.on_ended.append(actions.conversations.add)
        return [actions]

    def open_connector(self, scheduler: EngineScheduler) -> KVConnector:
        """Return the connector between the sources and a scheduler, which is made from a header `with_settings`."""
        state = scheduler.resource(TransferState)
        assert state is not None, "a header with settings makes a scheduler with transfers"
        return KVConnector(self.sources, state, self.movers, self.policy, self.timeouts)


def connect(
    config: EngineConfig,
    platform: Platform,
    memory: StepMemory,
    layout: str,
    fingerprint: str,
    of_others: Sequence[Array] = (),
) -> Connection:
    """Make the sources that a config names, in their order: plugins, other engines, the host, the disk.

    Args:
        layout: the name of the attention backend, which defines the layout of pages.
        fingerprint: of the model and of how its KV is stored.
        of_others: the KV of the engine's other ranks, whose parts of a page belong to it.

    Raises:
        InvalidConfig: a source cannot be found or made, or KV is in the host's memory already.
    """
    if config.kv_host_size and not platform.is_accelerator:
        raise InvalidConfig("--kv-host-size is for GPUs: on a CPU all KV is in the host's memory; see --num-pages")
    movers = _movers(platform, memory, layout, of_others)
    index, _ = config.replica
    num_pages, window = memory.size.num_pages, memory.size.window.window if memory.size.window else 0
    context = SourceContext(movers.pages, config.page_size, num_pages, fingerprint, engine=index)
    context = msgspec.structs.replace(context, states=movers.states, windows=movers.windows, window=window)
    sources = [find_source(name)(context) for name in config.kv_source]
    policy, timeouts = config.kv_load_failure_policy, TransferTimeouts()
    remote = parse_kv_transfer_config(config.kv_transfer_config)
    if isinstance(remote, OwnConnector):
        sources.append(own_connector(remote, context))
        policy = remote.kv_load_failure_policy or policy
    elif remote is not None:
        if platform.is_accelerator:
            raise InvalidConfig(f"{FLAG} is for CPUs so far: pages of a GPU do not go to other engines yet")
        from tokenmill.engine.transfer.remote.messages import OF_STATES, OF_WINDOWS
        from tokenmill.engine.transfer.remote.source import remote_source

        (_, pieces), (_, windows) = memory.full_kv, memory.window_kv
        beside = {OF_WINDOWS: windows, OF_STATES: memory.states.pieces if memory.states is not None else ()}
        sizes = config.tensor_parallel_size, config.pipeline_parallel_size
        sources.append(remote_source(remote, context, (*pieces, *of_others), layout, beside, sizes))
        policy, timeouts = remote.kv_load_failure_policy or policy, TransferTimeouts(**remote.timeouts)
    if config.kv_host_size:
        sources.append(host_tier(context, config.kv_host_size))
    if config.slot_save_path:
        sources.append(session_files(context, Path(config.slot_save_path).expanduser()))
    if config.kv_disk:
        folder = Path(config.kv_disk).expanduser()
        sources += disk_tiers(context, folder, config.kv_disk_size)
    return Connection(tuple(sources), movers, policy, timeouts, bool(remote or config.kv_source))


def _movers(platform: Platform, memory: StepMemory, layout: str, of_others: Sequence[Array]) -> Movers:
    tensors, pieces = memory.full_kv
    pages = _mover(platform, (*pieces, *of_others), layout_of((*tensors, *of_others), layout))
    states = windows = None
    if memory.states is not None:
        states = _mover(platform, memory.states.pieces, layout_of(memory.states.pieces, "states"))
    if memory.size.window is not None:
        tensors, pieces = memory.window_kv
        windows = _mover(platform, pieces, layout_of(tensors, f"{layout} behind a window"))
    return Movers(pages, states, windows)


def _mover(platform: Platform, pieces: Sequence[Array], layout: str) -> PageMover:
    if platform.is_accelerator:
        from tokenmill.engine.transfer.device_pages import DevicePages

        return DevicePages(platform, pieces, layout)
    return RawPages(pieces, layout)


class OfRole:
    """A source that takes only its role's part: a producer has nothing to load, a consumer stores nothing."""

    def __init__(self, source: KVSource, role: str) -> None:
        self.name = source.name
        self.stores = source.stores and role != "kv_consumer"
        self._source = source
        self._loads = role != "kv_producer"

    def lookup(self, query: KVQuery, params: dict[str, Any] | None) -> Answer | None:
        """Return what the source has of a prompt; see `KVSource.lookup`."""
        answer = self._source.lookup(query, params)
        return answer if answer is None or self._loads else Answer(keeps=answer.keeps)

    def __getattr__(self, name: str) -> Any:
        """Leave all else to the source."""
        return getattr(self._source, name)


def own_connector(config: OwnConnector, context: SourceContext) -> KVSource:
    """Make the source that `--kv-transfer-config` names, with its options and in its role.

    Raises:
        InvalidConfig: no source has this name, or its module cannot be imported.
    """
    options, role = config.kv_connector_extra_config, config.kv_role
    context = msgspec.structs.replace(context, options=options, role=role)
    return cast(KVSource, OfRole(find_source(config.source, FLAG)(context), role))


def find_source(name: str, flag: str = "--kv-source") -> Callable[[SourceContext], KVSource]:
    """Return the callable that makes the source of this name, which a flag has given.

    Raises:
        InvalidConfig: no source has this name, or its module cannot be imported.
    """
    found = find_plugin(flag, SOURCE_PLUGINS, name)
    if not callable(found):
        raise InvalidConfig(f"{flag} must be an entry point of {SOURCE_PLUGINS} or module:name, got {name!r}")
    return cast(Callable[[SourceContext], KVSource], found)


def disk_tiers(context: SourceContext, folder: Path, limit: int | None) -> list[Tier]:
    """Return the tier of a folder; none on a full disk, which must not keep a dead engine from coming back.

    Args:
        limit: bytes that pages may take; None: a share of the disk.

    Raises:
        InvalidConfig: the folder cannot be used, or a limit that was set holds no page.
    """
    try:
        return [disk_tier(context, folder, limit or _free_share(folder))]
    except InvalidConfig as error:
        has_no_room = limit is None and _free_share(folder) < context.mover.page_bytes
        if not has_no_room and not (isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.ENOSPC):
            raise
        logger.warning("%s; KV is kept in memory alone until the next start", error)
        return []


def disk_tier(context: SourceContext, folder: Path, limit: int) -> Tier:
    """Make a tier that keeps pages in files of a folder.

    Args:
        limit: bytes that pages may take.

    Raises:
        InvalidConfig: the folder cannot be used, or `limit` holds no page.
    """
    shares = [share for _, _, share in _parts(context, limit)]
    opened: list[SlotFile] = []
    try:
        for form, share in zip(_forms(context), shares, strict=True):
            opened.append(SlotFile(folder, form, share, context.engine))
    except OSError as error:
        for store in opened:
            store.close()
        raise InvalidConfig(f"--kv-disk {folder}: {error.strerror or error}") from error
    return _tier(context, [SharedTable("disk", file) for file in opened])


def _tier(context: SourceContext, tables: Sequence[SlotTable]) -> Tier:
    """Return the tier over the tables of `_parts`."""
    named = dict(zip([kind for kind, _, _ in _parts(context, 0)], tables, strict=True))
    states, windows = named.get("-states"), named.get("-windows")
    return Tier(PrefixTables(named[""], context.page_size, states, windows, context.window))


def session_files(context: SourceContext, folder: Path) -> SessionFiles:
    """Make the source that has what session files of a folder have.

    Raises:
        InvalidConfig: the folder cannot be used.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidConfig(f"--slot-save-path {folder}: {error.strerror or error}") from error
    named = dict(zip([kind for kind, _, _ in _parts(context, 0)], _forms(context), strict=True))
    form = SessionForm(named[""], named.get("-states"), context.page_size, named.get("-windows"))
    return SessionFiles(form, context.page_size, context.window)


def _forms(context: SourceContext) -> list[SlotFormat]:
    """Return the forms of pages and states in files, named by all that their bits depend on, and by no release."""
    parts = _parts(context, 0)
    layouts = "/".join(mover.layout for _, mover, _ in parts)
    whose = f"{VERSION}/{context.fingerprint}/{layouts}/{context.page_size}"
    name = blake2b(whose.encode(), digest_size=8).hexdigest()
    return [SlotFormat(name + kind, mover.page_bytes, context.page_size) for kind, mover, _ in parts]


def host_tier(context: SourceContext, limit: int) -> Tier:
    """Make a tier that keeps pages in the host's memory.

    Raises:
        InvalidConfig: `limit` holds no page.
    """
    parts = _parts(context, limit)
    for _, mover, share in parts:
        if share < mover.page_bytes:
            raise InvalidConfig(f"--kv-host-size: {share} bytes hold no page or state of {mover.page_bytes}")
    return _tier(context, [SlotTable("host", SlotMemory(mover.page_bytes, share)) for _, mover, share in parts])


def _parts(context: SourceContext, limit: int) -> list[tuple[str, PageMover, int]]:
    """Return what a tier stores, by name, with its mover and the bytes for it.

    As much for states as for pages; for pages of the window group what as many of them as of others take.
    """
    parts: list[tuple[str, PageMover, int]] = []
    if context.states is not None:
        parts.append(("-states", context.states, limit // 2))
    if context.windows is not None:
        size = context.windows.page_bytes
        parts.append(("-windows", context.windows, limit * size // (size + context.mover.page_bytes)))
    return [("", context.mover, limit - sum(share for _, _, share in parts)), *parts]


def _free_share(folder: Path) -> int:
    """Return the bytes that a tier takes of a disk unless the user sets a limit: the same after a restart."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    own = sum(path.stat().st_blocks * 512 for path in folder.glob("kv-*.pages"))
    return min(MOST_BYTES, (shutil.disk_usage(there).free + own) // SHARE)
