"""`tokenmill bench quality`: measure what each format of weights and KV loses against float32, on a text.

Runs the model as it is served, one format after the other, and looks at the logits of prompts.
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenmill.config.configs import EngineConfig
from tokenmill.config.parser import Parser
from tokenmill.core.errors import InvalidConfig, TokenMillError
from tokenmill.core.sampling_params import SamplingParams
from tokenmill.core.sizes import size_text
from tokenmill.lab.bench.divergence import Score, Scorer, scored_positions
from tokenmill.lab.bench.offline import add_engine_flags, engine_config, engine_facts
from tokenmill.lab.bench.plot import Line, Panel, check_plot, draw
from tokenmill.lab.bench.progress import progress_bar
from tokenmill.lab.bench.report import machine_facts, print_document
from tokenmill.lab.bench.workload import at_least

if TYPE_CHECKING:
    from tokenmill.llm.llm import LLM

REFERENCE = "float32"
# Format -> dtype and quantization.
FORMATS = {
    REFERENCE: ("float32", "none"),
    "bf16": ("bfloat16", "none"),
    "stored": ("bfloat16", "none"),
    "int8": ("bfloat16", "int8"),
    "int4": ("bfloat16", "int4"),
    "fp8": ("bfloat16", "fp8"),
}
DTYPE_NAMES = {"float32": "float32", "bfloat16": "bf16"}
KV_TYPES = ("auto", "int8", "int8-int4", "int4")
BUNDLED = Path(__file__).with_name("quality_text.txt")
# Columns of the table: key, title, how a number is written.
COLUMNS = (
    ("format", "format", "{}"),
    ("kv", "KV", "{}"),
    ("ppl", "perplexity", "{:.4f}"),
    ("ppl_ratio", "of float32's", "{:.4f}"),
    ("kl_mean", "KL mean", "{:.5f}"),
    ("kl_p99", "KL p99", "{:.4f}"),
    ("same_top", "same top", "{:.2%}"),
)


def run(arguments: Sequence[str]) -> int:
    """Measure and print a table, then JSON; returns 0.

    Raises:
        TokenMillError: a flag is out of range, the text is too short, or the model cannot be loaded.
    """
    namespace = make_parser().parse(arguments)
    check_plot(namespace.plot)
    at_least("--chunks", namespace.chunks, 1)
    at_least("--context", namespace.context, 8)
    formats = _names("--formats", namespace.formats, tuple(FORMATS))
    kv_types = _names("--kv", namespace.kv, KV_TYPES)
    if namespace.positional_model is not None:
        namespace.model = namespace.positional_model
    base, text = engine_config(namespace), _read(namespace.text)
    document = measure(base, text, formats, kv_types, namespace.context, namespace.chunks)
    document["text"] = str(namespace.text or "bundled")
    print(table(document["rows"]))
    try:
        if namespace.plot is not None:
            title = f"bench quality: {base.model or 'demo model'}, {document['num_scored']} positions"
            draw(namespace.plot, [_panel(document["rows"])], title)
    except OSError as error:
        raise TokenMillError(f"cannot write {error.filename}: {error.strerror}") from None
    finally:
        print_document(document)
    return 0


def make_parser() -> Parser:
    """Return the parser of `bench quality`."""
    parser = Parser(
        "bench quality", "Measure what formats lose against float32 on a text; the last line is JSON.", "[MODEL]"
    )
    parser.add_argument(
        "positional_model",
        nargs="?",
        metavar="MODEL",
        help="folder, .gguf file, hub id or name of the catalogue (default: the bundled demo model)",
    )
    parser.add_argument("--text", metavar="FILE", help="a UTF-8 text (default: one that comes with TokenMill)")
    parser.add_argument(
        "--formats", default="", metavar="LIST", help=f"of {','.join(FORMATS)} (default: all that the model can have)"
    )
    parser.add_argument("--kv", default="auto", metavar="LIST", help=f"types of KV of {','.join(KV_TYPES)}, for each")
    parser.add_argument("--context", type=int, default=512, metavar="N", help="tokens of a chunk (default: 512)")
    parser.add_argument("--chunks", type=int, default=8, metavar="N", help="most chunks of the text (default: 8)")
    parser.add_argument("--plot", metavar="FILE", help="draw divergence over bytes, e.g. out.png (needs matplotlib)")
    add_engine_flags(parser)
    return parser


def measure(
    base: EngineConfig,
    text: str,
    formats: Sequence[str] = (),
    kv_types: Sequence[str] = ("auto",),
    context: int = 512,
    most_chunks: int = 8,
) -> dict[str, Any]:
    """Run float32, then each pair of format and KV type; returns the JSON document.

    Args:
        formats: some of `FORMATS`; none: those that the model can have.

    Raises:
        TokenMillError: the text is shorter than a chunk, or the model cannot be loaded.
    """
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="tokenmill-quality-") as folder:
        store = Path(folder) / "reference"
        with _load(base, REFERENCE, "auto", context) as llm:
            chunks = cut(llm, text, context, most_chunks)
            reference, facts = _run(llm, chunks, store, REFERENCE), engine_facts(llm)
            rows.append(_row(llm, REFERENCE, "auto", reference, reference))
        possible = _possible(Path(facts["model"]), facts["device"])
        pairs = [(name, kv) for name in formats or possible for kv in kv_types]
        for name, kv in pairs:
            if (name, kv) == (REFERENCE, "auto"):
                continue
            with _load(base, name, kv, context) as llm:
                rows.append(_row(llm, name, kv, _run(llm, chunks, store, f"{name}, KV {kv}"), reference))
    return {
        "benchmark": "quality",
        "model": facts["model"],
        "context": context,
        "num_scored": len(chunks) * len(scored_positions(context)),
        "rows": rows,
        "machine": machine_facts(),
    }


def cut(llm: LLM, text: str, context: int, most: int) -> list[list[int]]:
    """Return chunks of `context` token ids from all over the text; the first id is BOS where the model expects one.

    Raises:
        InvalidConfig: the text is shorter than a chunk, or the chunks are longer than the model's context.
    """
    if context > llm.info.max_model_len - 1:
        raise InvalidConfig(f"--context {context} and a token more exceed the context of {llm.info.max_model_len}")
    tokenizer = llm.get_tokenizer()
    ids = tokenizer.encode(text, add_special_tokens=False)
    whole, bare = (tokenizer.encode("a", add_special_tokens=is_added) for is_added in (True, False))
    first = whole[:1] if whole[:1] != bare[:1] else []
    places = range(0, len(ids) - context + 1, context)
    count = min(most, len(places))
    starts = [places[number * len(places) // count] for number in range(count)]
    if not starts:
        raise InvalidConfig(f"the text has {len(ids)} tokens, fewer than one chunk of {context} (--context)")
    return [[*first, *ids[start + len(first) : start + context]] for start in starts]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as lines of text."""
    lines = [[title for _, title, _ in COLUMNS] + ["weights"]]
    lines += [[form.format(row[key]) for key, _, form in COLUMNS] + [size_text(row["bytes"])] for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def _names(flag: str, given: str, choices: Sequence[str]) -> list[str]:
    names = [name for name in given.split(",") if name]
    for name in names:
        if name not in choices:
            raise InvalidConfig(f"{flag}: choose of {', '.join(choices)}, got {name!r}")
    return names


def _read(path: str | None) -> str:
    try:
        return (BUNDLED if path is None else Path(path)).read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidConfig(f"--text: cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InvalidConfig(f"--text: {path} is not UTF-8 text") from None


def _possible(folder: Path, device: str) -> tuple[str, ...]:
    """Return the formats that a checkpoint can have on a device: one that is stored in few bits stays as it is."""
    from tokenmill.model.quantization.packed import UNQUANTIZED
    from tokenmill.model.weights.loader import choose_formats

    if choose_formats(folder, None) != UNQUANTIZED:
        return ("stored",)
    return ("bf16", "fp8") if device == "cuda" else ("bf16", "int8", "int4")


def _load(base: EngineConfig, name: str, kv: str, context: int) -> LLM:
    from tokenmill.llm.local import load_llm

    dtype, quantization = FORMATS[name]
    if name == REFERENCE:  # kernels and attention that are asked for may have no float32
        base = dataclasses.replace(base, kernels="auto", attention_backend="auto")
    return load_llm(
        dataclasses.replace(
            base,
            dtype=dtype,
            quantization=quantization,
            kv_cache_dtype=kv,
            async_scheduling=False,
            max_model_len=base.max_model_len or context + 16,
            max_num_seqs=1,
        )
    )


def _run(llm: LLM, chunks: Sequence[Sequence[int]], store: Path, title: str) -> Score:
    from tokenmill.llm.local import watch_prompt_logits

    scorer = Scorer(chunks, llm.info.vocab_size, store, is_reference=title == REFERENCE)
    watch_prompt_logits(llm, scorer.add_logits)
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0.0)
    with progress_bar() as bar:
        task = bar.add_task(title, total=len(chunks), rate="")
        for number, chunk in enumerate(chunks):
            scorer.begin_chunk(number)
            output = llm.submit(list(chunk), params)
            while not output.finished:
                llm.step()
            if output.outputs[0].error is not None:
                raise TokenMillError(output.outputs[0].error)
            bar.update(task, completed=number + 1)
    print(f"{title}: {len(chunks)} chunks", file=sys.stderr)
    return scorer.score()


def _row(llm: LLM, name: str, kv: str, score: Score, reference: Score) -> dict[str, Any]:
    kv = DTYPE_NAMES[FORMATS[name][0]] if kv == "auto" else kv
    return {"format": name, "kv": kv, **score.row(reference), "bytes": llm.info.weight_bytes}


def _panel(rows: Sequence[dict[str, Any]]) -> Panel:
    lines = [Line(f"{row['format']}, KV {row['kv']}", [row["bytes"] / 1e6], [row["kl_mean"]]) for row in rows]
    return Panel("loss by size", "megabytes of weights", "mean KL divergence from float32", lines)
