"""Triton's interpreter without its largest cost: at every call of a function inside a kernel it looks through all of
`triton.language` for what to replace there, though that is replaced already, and it makes its table of types anew at
every number.
"""

from __future__ import annotations

import functools
from types import FunctionType

import triton.language as tl
from triton.runtime import interpreter


def replace_language_once() -> None:
    """Leave replaced in this process what was replaced for one kernel."""
    replace, replaced = interpreter._patch_lang, set[str]()

    def replace_once(kernel: FunctionType) -> interpreter._LangPatchScope:
        wanted = {one.__name__ for one in kernel.__globals__.values() if one is tl or one is tl.core}
        if not wanted <= replaced:
            replace(kernel)
            replaced.update(wanted)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = replace_once
    of_scalar = functools.cache(interpreter._get_np_dtype)
    interpreter._get_np_dtype = lambda dtype: (
        interpreter.np.dtype(interpreter.np.uint64) if dtype.scalar.is_ptr() else of_scalar(dtype.scalar)
    )
