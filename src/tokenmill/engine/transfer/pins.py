"""`Load` and `Pin`: pages that a source fills, and pages of the tree that one reads, until that is over."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set

import msgspec

from tokenmill.core.request import CacheKey, Request, TokenArray
from tokenmill.core.transfers import LoadOrder
from tokenmill.engine.kv.kv_manager import KVManager
from tokenmill.engine.kv.radix_node import PageArray, RadixNode
from tokenmill.engine.scheduler.resources.state_slots import StateSlots


class Load(msgspec.Struct, frozen=True):
    """A load that is not over, and the request whose pages it fills."""

    order: LoadOrder
    request: Request


class Pin(msgspec.Struct, frozen=True):
    """Locked pages of the tree that a source reads.

    Attributes:
        node: the deepest node, locked.
        tokens: of the whole prefix, [pages * page_size] int32.
        pages: of the whole prefix.
        num_saving: how many of them, the last ones, are being saved.
        states: slots of the recurrent states that are read, by the number of pages that one stands behind.
        kept_of, kept_for: the request whose pages are kept, and the source that wants them; "": they are being saved.
        is_export: they are kept, or saved for one source, whatever others have.
        windows: of kept and exported pages those of the window group, by the number of their full page.
    """

    node: RadixNode
    cache_key: CacheKey
    tokens: TokenArray
    pages: PageArray
    num_saving: int = 0
    states: dict[int, int] = {}
    kept_of: str = ""
    kept_for: str = ""
    is_export: bool = False
    windows: dict[int, int] = {}


def pin_states(slots: StateSlots, pins: Iterable[Pin], pages: PageArray, ends: Iterable[int]) -> list[tuple[int, int]]:
    """Pin the states of a locked path that a source wants kept, nearest to these ends of it, the most important first.

    Args:
        pins: that are there already: kept ones may have half of all slots, so that as many are left to requests.

    Returns:
        For each the number of pages that it stands behind, and its slot.
    """
    found: dict[int, int] = {}
    left = slots.num_slots // 2 - sum(len(pin.states) for pin in pins if pin.kept_of)
    for end in ends:
        depth = slots.num_begun_by(pages[:end].tolist())
        if depth and depth not in found and len(found) < left:
            ((_, found[depth]),) = slots.pin_unsaved(pages[depth - 1 : depth].tolist(), exports=True)
    return list(found.items())


def check_pins(
    loads: Mapping[int, Load], pins: Mapping[int, Pin], kv: KVManager, num_saving: int, kept: Set[int]
) -> None:
    """Raise AssertionError if a load fills pages that its request has not, or pages that are read may move.

    Args:
        num_saving, kept: pages that are being saved, and ids of the pins of kept pages, as they are counted elsewhere.
    """
    for load in loads.values():
        held = kv.pages(load.request)
        assert held[load.order.first_page :] == load.order.page_ids, "a load fills other pages than its request has"
        assert load.request.awaits_kv or load.request.is_finished, "a request went on while it loads"
    for pin in pins.values():
        assert pin.node.locks > 0, "pages that are read are not locked"
        assert pin.pages.tolist() == pin.node.path_pages().tolist(), "pages that are read have moved"
    assert num_saving == sum(pin.num_saving for pin in pins.values()), "a save is lost"
    assert kept == {number for number, pin in pins.items() if pin.kept_of}, "a pin is lost"
