// Follows what is written at the end of a box that scrolls, until somebody scrolls up to read.

import { place } from "./place.js";
import { useEffect, useLayoutEffect, useRef, useState } from "./ui.js";

const NEAR_END = 24;
const RESTORE_MS = 3000;
// A box also moves when its content shrinks or a line wraps; only what follows a hand's move is somebody's wish.
const HAND_MS = 1000;
const DRAG_MS = 10_000;

const fromEnd = (box) => box.scrollHeight - box.scrollTop - box.clientHeight;

// `box` scrolls, and `sheet` in it grows. What it returns: whether it follows, and what makes it follow again.
export function useFollow(box, sheet, id, isShown) {
  const state = useRef({ follows: true, top: 0, wanted: null, until: 0, hand: 0 }).current;
  const [follows, show] = useState(true);
  const set = (value) => {
    state.follows = value;
    show(value);
  };
  const settle = () => {
    const node = box.current;
    if (!node?.clientHeight) return;
    if (state.follows) node.scrollTop = node.scrollHeight;
    else if (state.wanted !== null && performance.now() < state.until) node.scrollTop = state.wanted;
    state.top = node.scrollTop;
  };
  useLayoutEffect(() => {
    const top = place.scroll(id);
    Object.assign(state, { wanted: top, until: performance.now() + RESTORE_MS });
    set(top === null);
    settle();
  }, [id, isShown]);
  useEffect(() => {
    const observer = new ResizeObserver(settle);
    observer.observe(box.current);
    observer.observe(sheet.current);
    return () => observer.disconnect();
  }, []);
  // A hand on the wheel, the screen, the bar or the keys; it ends what this page is about to do with the box.
  const touch = (lasts) => () => {
    Object.assign(state, { wanted: null, hand: performance.now() + lasts });
  };
  const onScroll = () => {
    const node = box.current;
    const isUp = node.scrollTop < state.top - 1 && performance.now() < state.hand;
    state.top = node.scrollTop;
    if (state.wanted !== null && performance.now() < state.until) return;
    const isAtEnd = fromEnd(node) < NEAR_END;
    if (isAtEnd !== state.follows && (isAtEnd || isUp)) set(isAtEnd);
    place.setScroll(id, state.follows ? null : node.scrollTop);
  };
  const toEnd = () => {
    state.wanted = null;
    set(true);
    settle();
    place.setScroll(id, null);
  };
  return { follows, toEnd, handlers: { onScroll, onWheel: touch(HAND_MS), onTouchMove: touch(HAND_MS),
    onKeyDown: touch(HAND_MS), onPointerDown: touch(DRAG_MS) } };
}
