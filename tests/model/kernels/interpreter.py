"""Triton's interpreter without its largest cost: at every call of a function inside a kernel it looks through all of
`triton.language` for what to replace there, though that is replaced already, and it makes its table of types anew at
every number. And with products of bfloat16, whose bits it would multiply as integers.
"""

from __future__ import annotations

import functools
from types import FunctionType
from typing import Any

import numpy as np
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
    interpreter.InterpreterBuilder.create_dot = dot_of_floats
    of_scalar = functools.cache(interpreter._get_np_dtype)
    interpreter._get_np_dtype = lambda dtype: (
        interpreter.np.dtype(interpreter.np.uint64) if dtype.scalar.is_ptr() else of_scalar(dtype.scalar)
    )


def dot_of_floats(
    builder: Any, a: Any, b: Any, d: Any, *options: Any, original: Any = interpreter.InterpreterBuilder.create_dot
) -> Any:
    """Multiply as the interpreter does; bfloat16, which numpy lacks, as float32."""
    return original(builder, *(_widened(one) for one in (a, b)), d, *options)


def _widened(handle: interpreter.TensorHandle) -> interpreter.TensorHandle:
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    return interpreter.TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)
