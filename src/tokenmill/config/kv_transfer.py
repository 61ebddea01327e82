"""Read `--kv-transfer-config`, with vLLM's names: which engines give pages, which ask for them, and where.

The connector is one of ours, between engines of TokenMill, or a source of somebody else's with a role and options.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tokenmill.core.errors import InvalidConfig
from tokenmill.core.plugins import find_plugin

NIXL = "NixlConnector"
CONNECTORS = ("TokenMillConnector", NIXL)
# The group of entry points that name sources of one's own: each a callable that takes a `SourceContext`.
SOURCE_PLUGINS = "tokenmill.kv_sources"
# What the source itself ends by a deadline of its own ends so much later whatever has become of the source.
GRACE_SECONDS = 5.0
FLAG = "--kv-transfer-config"

Role = Literal["kv_producer", "kv_consumer", "kv_both"]
_Peer = Annotated[str, Meta(pattern=r"^(unix:.+|tcp://.+:\d{1,5})$")]
_Seconds = Annotated[float, Meta(ge=0.1, le=86_400)]


class ExtraConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`kv_connector_extra_config`: settings for which vLLM has no name.

    Attributes:
        secret_file: the secret that producers and consumers share; no other user may read the file.
        socket: a producer listens at this unix socket instead of `kv_ip` and `kv_port`.
        peers: addresses of the producers that a consumer may ask: `unix:PATH` or `tcp://HOST:PORT`. The names that
            clients give are looked up among these.
        lease_seconds: how long a producer holds pages that no consumer asks for.
        most_lease_seconds: how long it holds them at most.
        fetch_seconds: how long the pages of one request may take to come.
    """

    secret_file: str = ""
    socket: str | None = None
    peers: list[_Peer] = []
    lease_seconds: _Seconds = 30.0
    most_lease_seconds: _Seconds = 600.0
    fetch_seconds: _Seconds = 30.0


class KVTransferConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The settings of page transfers between engines: the value of the flag.

    Attributes:
        kv_connector: pages travel by our own transports, or by NIXL.
        engine_id: a producer's name in handles; None: a random one at each start.
        kv_ip, kv_port: the address that a producer listens at and tells its clients; of several engines of one
            server, each takes the port after that of the one before.
        kv_load_failure_policy: what happens to a request whose pages do not come; None: as the flag says.
    """

    kv_connector: str
    kv_role: Role
    engine_id: Annotated[str, Meta(min_length=1, max_length=64)] | None = None
    kv_ip: Annotated[str, Meta(min_length=1, max_length=255)] = "127.0.0.1"
    kv_port: Annotated[int, Meta(ge=1, le=65_000)] = 14579
    kv_load_failure_policy: Literal["recompute", "fail"] | None = None
    kv_connector_extra_config: ExtraConfig = ExtraConfig()

    @property
    def produces(self) -> bool:
        """True if it gives pages."""
        return self.kv_role != "kv_consumer"

    @property
    def consumes(self) -> bool:
        """True if it asks for pages."""
        return self.kv_role != "kv_producer"

    @property
    def timeouts(self) -> dict[str, float]:
        """Seconds after which an engine goes on without pages, or takes them back, regardless of the source."""
        extra = self.kv_connector_extra_config
        return {"load": extra.fetch_seconds + GRACE_SECONDS, "keep": extra.most_lease_seconds + GRACE_SECONDS}


class OwnConnector(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The settings of a source of somebody else's, by the name of an entry point or of its class.

    Attributes:
        kv_connector_module_path: the module of the class `kv_connector`; "": it is an entry point or `module:name`.
        kv_role: a producer loads nothing, a consumer stores nothing.
        kv_connector_extra_config: its options, as they are.
    """

    kv_connector: str
    kv_role: Role
    kv_connector_module_path: str = ""
    kv_connector_extra_config: dict[str, Any] = {}
    kv_load_failure_policy: Literal["recompute", "fail"] | None = None

    @property
    def source(self) -> str:
        """Its name as `--kv-source` has it."""
        return ":".join(filter(None, (self.kv_connector_module_path, self.kv_connector)))


class _Named(msgspec.Struct, frozen=True):
    kv_connector: str
    kv_connector_module_path: str = ""

    @property
    def is_ours(self) -> bool:
        return self.kv_connector in CONNECTORS and not self.kv_connector_module_path


def parse_kv_transfer_config(text: str | None) -> KVTransferConfig | OwnConnector | None:
    """Read the flag's JSON; None: no pages come from other engines.

    Raises:
        InvalidConfig: saying which field is wrong, and how.
    """
    if text is None or text.strip() in ("{}", "null"):
        return None
    try:
        named = msgspec.json.decode(text, type=_Named)
        if not named.is_ours:
            return _own(text, named)
        config = msgspec.json.decode(text, type=KVTransferConfig)
        extra = config.kv_connector_extra_config
        if not extra.secret_file:
            raise InvalidConfig(
                "kv_connector_extra_config needs a secret_file: engines that ask for KV must know the secret"
            )
        if config.consumes and not extra.peers:
            raise InvalidConfig("a consumer needs kv_connector_extra_config.peers, the producers that it may ask")
        if extra.most_lease_seconds < extra.lease_seconds:
            raise InvalidConfig("most_lease_seconds must be at least lease_seconds")
        if config.kv_ip in ("0.0.0.0", "::"):
            raise InvalidConfig(f"kv_ip is told to consumers, so it cannot be {config.kv_ip}")
    except (msgspec.DecodeError, InvalidConfig) as error:
        raise InvalidConfig(f"{FLAG}: {error}") from error
    return config


def own_sources_have(attribute: str, kv_source: Iterable[str], kv_transfer_config: str | None) -> bool:
    """Return True if all sources of the user's own, which these flags name, have a true attribute; see `KVSource`.

    Raises:
        InvalidConfig: the module of one cannot be imported.
    """
    named = [("--kv-source", name) for name in kv_source]
    remote = parse_kv_transfer_config(kv_transfer_config)
    if isinstance(remote, OwnConnector):
        named.append((FLAG, remote.source))
    return all(getattr(find_plugin(flag, SOURCE_PLUGINS, name), attribute, False) for flag, name in named)


def _own(text: str, named: _Named) -> OwnConnector:
    """Read the settings of a source that is not ours; its class is imported when the engine connects it."""
    if not named.kv_connector_module_path and ":" not in named.kv_connector:
        from importlib.metadata import entry_points  # takes 15 ms to import, and most starts have no plug-in

        if not entry_points(group=SOURCE_PLUGINS, name=named.kv_connector):
            raise InvalidConfig(
                f"unknown kv_connector {named.kv_connector!r}: use {' or '.join(CONNECTORS)}, an entry point of "
                f"{SOURCE_PLUGINS}, or module:name"
            )
    return msgspec.json.decode(text, type=OwnConnector)
