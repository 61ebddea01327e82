"""`CapturedDecodes`: run the decodes of a step as one graph, from the token table back to it."""

from __future__ import annotations

from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from tokenmill.engine.runner.cuda_graphs import LARGEST, DecodeGraphs, Report
from tokenmill.engine.runner.model import Model
from tokenmill.engine.runner.row_state import RowState
from tokenmill.engine.runner.samples import Samples
from tokenmill.engine.runner.step_sampler import DeviceSampler, Masks, Sampled, places
from tokenmill.engine.runner.transport import Arrays, Sent
from tokenmill.model.adapters.rows import DeviceRowAdapters
from tokenmill.model.attention.batch import DeviceLens, ForwardBatch
from tokenmill.model.attention.groups import GroupedPagedAttention
from tokenmill.model.attention.paged import PagedAttention
from tokenmill.model.kernels.triton.decode_inputs import decode_inputs
from tokenmill.model.sampling.draws import RECORD, Draw, pack
from tokenmill.model.sampling.state import SamplingMetadata
from tokenmill.platform.protocol import Event, Platform, Stream, Tensors


class CapturedDecodes:
    """Graphs of whole decode steps; see `DecodeGraphs`. The spare last row of the tables pads steps.

    Args:
        stream: the stream of the steps.
        num_speculative_tokens: most drafts of a request; 0: none are expected.
        rows: what rows have besides tokens and pages: adapters (steps in which a row has one have graphs of their own),
            positions shifted behind images, recurrent states.
    """

    def __init__(
        self,
        platform: Platform,
        stream: Stream,
        model: Model,
        attention: PagedAttention | GroupedPagedAttention,
        sampler: DeviceSampler,
        num_speculative_tokens: int = 0,
        rows: RowState | None = None,
    ) -> None:
        adapters = None if rows is None else rows.adapters
        assert adapters is None or isinstance(adapters, DeviceRowAdapters), "a GPU has its adapters in slots"
        self._model = model
        self._recurrences = None if rows is None else rows.recurrences
        self._encoder = None if rows is None else rows.encoder
        self._attention = attention.in_graphs()
        self._stream = stream
        self._planned: Event | None = None
        self._sampler = sampler
        self._tables = sampler.tables
        with stream:
            self._indices = torch.arange(LARGEST, device=platform.device)
        spare_row = len(self._tables.pages) - 1
        padding = pack(np.array([Draw(row=spare_row)], dtype=RECORD))
        num_drafts = num_speculative_tokens if attention.takes_drafts else 0
        self._adapters = adapters
        plain, adapted = partial(self._decode, None), partial(self._decode, adapters)
        self._graphs = DecodeGraphs(platform, stream, plain, padding, spare_row, num_drafts)
        self._adapted = self._graphs
        if adapters is not None:
            self._adapted = DecodeGraphs(platform, stream, adapted, padding, spare_row, num_drafts)

    @torch.inference_mode()
    def capture(self, report: Report = lambda done, total: None, count: int | None = None) -> int:
        """Capture all sizes, or the largest `count`; return the number of graphs.

        Raises:
            InvalidConfig: no memory is left for them.
        """
        for graphs in self._kinds:
            graphs.capture(report, count)
        return sum(graphs.num_graphs for graphs in self._kinds)

    def close(self) -> None:
        """Release the graphs, and with them the model and the KV cache."""
        for graphs in self._kinds:
            graphs.close()

    @property
    def _kinds(self) -> list[DecodeGraphs]:
        return [self._graphs] if self._adapted is self._graphs else [self._adapted, self._graphs]

    def _graphs_for(self, rows: npt.NDArray[np.integer]) -> DecodeGraphs:
        has_adapters = self._adapters is not None and self._adapters.has_any(rows)
        return self._adapted if has_adapters else self._graphs

    def fit(self, arrays: Arrays, rows: npt.NDArray[np.int32], num_samples: npt.NDArray[np.int32]) -> bool:
        """Add a step's first draws to `arrays`, padded to the size of a graph. Return False if none is that large.

        Args:
            rows, num_samples: [n], of the first n requests, each of whose tokens is sampled from.
        """
        padded = self._graphs_for(rows).padded(arrays["draws"][: num_samples.sum()], num_samples)
        if padded is not None:
            arrays["decodes"], starts = padded
            arrays |= {} if starts is None else {"decode_starts": starts}
        return padded is not None

    def sample(
        self, samples: Samples, metadata: SamplingMetadata, sent: Sent, masks: Masks, outputs: torch.Tensor | None
    ) -> Sampled:
        """Run the decodes of the step whose arrays `fit`, and sample.

        Args:
            outputs: [m, hidden_size] of the model, from which the last m of the samples are; None: there are none.
        """
        num = len(samples) - (0 if outputs is None else len(outputs))
        starts = sent.get("decode_starts")
        if starts is None:
            self._plan_attention(samples.positions[:num], len(sent["decodes"]))
        graphs = self._graphs_for(samples.rows[:num])
        logits, drawn = (part[:num] for part in graphs.run(sent["decodes"], starts))
        if outputs is not None and len(outputs):
            others = self._model.logits(outputs)
            logits = torch.cat([logits, others])
            drawn = torch.cat([drawn, self._sampler.draw(others, sent["draws"][num:])])
        return self._sampler.sample_drawn(logits, drawn, samples, metadata, sent, masks)

    def _plan_attention(self, context_lens: npt.NDArray[np.int64], num_rows: int) -> None:
        """Let the attention plan the replay of a graph of `num_rows` rows."""
        if self._planned is not None:
            # The last plan is copied out of memory that the next one overwrites; by now it hardly ever waits.
            self._planned.wait()
        lens = np.ones(num_rows, dtype=np.int32)
        lens[: len(context_lens)] = context_lens
        self._planned = self._stream.record() if self._attention.before_replay(lens) else None

    def _decode(self, adapters: DeviceRowAdapters | None, draws: torch.Tensor, starts: torch.Tensor) -> Tensors:
        """Run a whole decode step of n tokens by their packed draws, as a graph holds it. Lengths stay on the device.

        Args:
            starts: [rows + 1] int32, the first token of each row; each has at most n / rows.
        """
        tables, n, rows = self._tables, len(draws), len(starts) - 1
        (token_ids, positions, slots), lens, page_table = decode_inputs(*places(draws), tables.pages, tables.tokens)
        if n > rows:
            last = starts[1:].long() - 1
            lens, page_table = lens[last], page_table[last]
        turned = None if self._encoder is None else positions + self._encoder.shifts[places(draws)[0]]
        batch = ForwardBatch(
            token_ids=token_ids,
            positions=positions,
            slots=slots,
            page_table=page_table,
            query_lens=np.full(rows, n // rows, dtype=np.int32),
            context_lens=np.full(rows, tables.tokens.shape[1], dtype=np.int32),
            query_starts=np.arange(0, n + 1, n // rows, dtype=np.int32),
            output_indices=self._indices[:n],
            lens=DeviceLens(lens, starts),
            adapters=None if adapters is None else adapters.of_rows(places(draws)[0]),
            turned=turned,
            states=None if self._recurrences is None else self._recurrences.of_decodes(places(draws)[0], starts),
        )
        logits = self._model.logits(self._model.forward(batch, self._attention))
        return logits, self._sampler.draw(logits, draws)
