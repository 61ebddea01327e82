"""Match regular expressions that come with an adapter, in a place where they can do no harm.

PEFT's configs may name modules by regular expressions, and the files are anybody's: some expressions take longer than
the universe is old, and Python tries them without letting go of the interpreter. So all but plain names are tried in a
process of their own, which has seconds and no more.
"""

from __future__ import annotations

import json
import re
import resource
import subprocess
from collections.abc import Mapping, Sequence

from tokenmill.core.errors import InvalidCheckpoint
from tokenmill.ipc.python_child import run_python

SECONDS = 2
_PLAIN = re.compile(r"[\w.\\-]*")
_TRY = """
import json, re, sys
asked = json.load(sys.stdin)
json.dump({name: [bool(re.fullmatch(form, key)) for key in asked["keys"]] for name, form in asked["forms"].items()},
          sys.stdout)
"""


def matches(forms: Mapping[str, str], keys: Sequence[str], source: str) -> dict[str, list[bool]]:
    """Return for each expression, by its name, the keys that it matches as a whole.

    Raises:
        InvalidCheckpoint: one is no regular expression, or they take too long; names `source`.
    """
    try:
        for form in forms.values():
            re.compile(form)
        if all(_PLAIN.fullmatch(name) for name in forms):
            # A name between dots, whatever is put around it, is compared in a time like its length.
            return {name: [bool(re.fullmatch(form, key)) for key in keys] for name, form in forms.items()}
    except (re.error, RecursionError, OverflowError) as error:
        raise InvalidCheckpoint(f"{source}: a pattern is no regular expression: {error}") from error
    question = json.dumps({"forms": dict(forms), "keys": list(keys)})
    try:
        done = run_python(
            ["-I", "-S", "-c", _TRY],
            input=question.encode(),
            capture_output=True,
            timeout=5 * SECONDS,
            preexec_fn=_limit,
        )
    except (subprocess.SubprocessError, OSError) as error:
        raise InvalidCheckpoint(f"{source}: its regular expressions could not be tried in {SECONDS} seconds") from error
    found: dict[str, list[bool]] = json.loads(done.stdout)
    return found


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
