"""An argparse parser that answers a mistake with the flag that was meant, in one line and exit code 2."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Sequence
from typing import NoReturn

# Spellings that users of vLLM and SGLang know. The ones that a verb does not define are refused as not supported yet,
# which is another answer than a typing mistake deserves.
KNOWN_ELSEWHERE = frozenset(
    """
    --model --served-model-name --host --port --uds --api-key --root-path --config --tokenizer --revision
    --download-dir --load-format --dtype --quantization -q --kv-cache-dtype --max-model-len --max-num-seqs
    --max-num-batched-tokens --gpu-memory-utilization --kv-cache-memory-bytes --block-size --num-gpu-blocks-override
    --enable-prefix-caching --no-enable-prefix-caching --enable-chunked-prefill --no-enable-chunked-prefill
    --long-prefill-token-threshold --scheduling-policy --async-scheduling --no-async-scheduling --stream-interval
    --tensor-parallel-size -tp --pipeline-parallel-size -pp --data-parallel-size -dp --distributed-executor-backend
    --enforce-eager --speculative-config -sc --structured-outputs-config --enable-auto-tool-choice --tool-call-parser
    --reasoning-parser --chat-template --default-chat-template-kwargs --seed --max-logprobs --attention-backend
    --max-num-queued-reqs --max-num-queued-tokens --kv-transfer-config --kv-events-config --enable-lora --lora-modules
    --max-loras --max-lora-rank --limit-mm-per-prompt --generation-config --override-generation-config
    --shutdown-timeout --ssl-keyfile --ssl-certfile --allowed-origins --otlp-traces-endpoint --enable-log-requests
    --disable-log-stats --model-path --context-length --mem-fraction-static --chunked-prefill-size
    --max-running-requests --tp --dp --page-size --num-pages --batch-policy --admission --tokenizer-workers --device
    --metrics-prefix
    """.split()  # noqa: SIM905  a hundred quoted words are no list to read
)


def did_you_mean(word: str, choices: Collection[str]) -> str:
    """`; did you mean X?`, or nothing where no choice is near."""
    import difflib

    near = difflib.get_close_matches(word, choices, n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else ""


class Parser(argparse.ArgumentParser):
    """Parses one verb. Abbreviated flags are refused: a flag added later would change what they mean."""

    def __init__(self, verb: str, description: str, positional: str = "") -> None:
        """`positional` is what the usage line shows beside the flags."""
        super().__init__(
            prog=f"tokenmill {verb}",
            usage=" ".join(filter(None, (f"tokenmill {verb}", positional, "[flags]"))),
            description=description,
            allow_abbrev=False,
            formatter_class=_WideHelp,
        )

    def error(self, message: str) -> NoReturn:
        """Say what is wrong in one line and exit with code 2."""
        print(f"{self.prog}: {message}", file=sys.stderr)
        raise SystemExit(2)

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Parse, refusing what is unknown by name.

        Raises:
            SystemExit: with code 2 on a mistake, with 0 after --help.
        """
        self._refuse_unknown_flags(arguments)
        return self.parse_args(arguments)

    def _refuse_unknown_flags(self, arguments: Sequence[str]) -> None:
        # Before argparse looks: it would take the value after an unknown flag for a positional and report that.
        known = self._option_string_actions
        for argument in arguments:
            if argument == "--":
                return
            name = argument.split("=", 1)[0]
            # A lone dash is stdin, and a dash with a digit a number.
            if argument.startswith("-") and name.lstrip("-")[:1].isalpha() and name not in known:
                self._refuse(name, known)

    def _refuse(self, name: str, known: Collection[str]) -> NoReturn:
        if name in KNOWN_ELSEWHERE:
            self.error(f"{name} is not supported yet")
        long_names = [flag for flag in known if flag.startswith("--")]
        self.error(f"unknown flag {name}{did_you_mean(name, long_names)}")


class _WideHelp(argparse.HelpFormatter):
    """Flags in a column wide enough for most of them; one line each where the terminal allows."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=44)
