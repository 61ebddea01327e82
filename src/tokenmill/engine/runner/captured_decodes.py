"""`CapturedDecodes`: run the decodes of a step as one graph, from the token table back to it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from tokenmill.core.hooks import hooks
from tokenmill.engine.runner.cuda_graphs import LARGEST, DecodeGraphs
from tokenmill.engine.runner.device_sampler import DeviceSampler
from tokenmill.engine.runner.model import Model
from tokenmill.engine.runner.samples import Samples
from tokenmill.engine.runner.step_sampler import Masks, Sampled, places
from tokenmill.model.attention.batch import BatchPages, DeviceLens, ForwardBatch
from tokenmill.model.attention.groups import GroupedPagedAttention
from tokenmill.model.attention.paged import PagedAttention
from tokenmill.model.attention.row_extension import Arrays, RowExtension, Sent
from tokenmill.model.kernels.triton.decode_inputs import decode_inputs, window_inputs
from tokenmill.model.sampling.draws import RECORD, Draw, pack
from tokenmill.model.sampling.state import SamplingMetadata
from tokenmill.platform.capturing import Report
from tokenmill.platform.protocol import Event, Platform, Stream, Tensors


class CapturedDecodes:
    """Graphs of whole decode steps; see `DecodeGraphs`. The spare last row of the tables pads steps.

    Args:
        stream: the stream of the steps.
        num_speculative_tokens: most drafts of a request; 0: none are expected.
        extensions: add to the batches of decodes. For rows of which those that define it `has_any`, there are graphs
            with all of them; graphs of other rows do without these.
    """

    def __init__(
        self,
        platform: Platform,
        stream: Stream,
        model: Model,
        attention: PagedAttention | GroupedPagedAttention,
        sampler: DeviceSampler,
        num_speculative_tokens: int = 0,
        extensions: Sequence[RowExtension] = (),
    ) -> None:
        self._model = model
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
        self._has_any = hooks(extensions, RowExtension.has_any)
        self._fits = hooks(extensions, RowExtension.fits_graph)
        always = [one for one in extensions if not hooks([one], RowExtension.has_any)]
        self._graphs = DecodeGraphs(platform, stream, partial(self._decode, always), padding, spare_row, num_drafts)
        self._full = self._graphs
        if self._has_any:
            full = partial(self._decode, extensions)
            self._full = DecodeGraphs(platform, stream, full, padding, spare_row, num_drafts)

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
        return [self._graphs] if self._full is self._graphs else [self._full, self._graphs]

    def _graphs_for(self, rows: npt.NDArray[np.integer]) -> DecodeGraphs:
        return self._full if any(has_any(rows) for has_any in self._has_any) else self._graphs

    def fit(self, arrays: Arrays, rows: npt.NDArray[np.int32], num_samples: npt.NDArray[np.int32]) -> bool:
        """Add a step's first draws to `arrays`, padded to the size of a graph. Return False if none holds them.

        Args:
            rows, num_samples: [n], of the first n requests, each of whose tokens is sampled from.
        """
        if not all(fits(num_samples) for fits in self._fits):
            return False
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
            outputs: [m, hidden_size] of the model, from which the last m of the samples are; None: absent.
        """
        num = len(samples) - (0 if outputs is None else len(outputs))
        logits, drawn = self._replay(samples, sent, num)
        if outputs is not None and len(outputs):
            others = self._sampler.logits(outputs, sent["draws"][num:], samples.rows[num:])
            logits = torch.cat([logits, others])
            drawn = torch.cat([drawn, self._sampler.draw(others, sent["draws"][num:])])
        return self._sampler.sample_drawn(logits, drawn, samples, metadata, sent, masks)

    def _replay(self, samples: Samples, sent: Sent, num: int) -> Tensors:
        """Run the graph for the first `num` samples of a step; return its outputs for these."""
        starts = sent.get("decode_starts")
        if starts is None:
            self._plan_attention(samples.positions[:num], len(sent["decodes"]))
        graphs = self._graphs_for(samples.rows[:num])
        return tuple(part[:num] for part in graphs.run(sent["decodes"], starts))

    def _plan_attention(self, context_lens: npt.NDArray[np.int64], num_rows: int) -> None:
        """Let the attention plan the replay of a graph of `num_rows` rows."""
        if self._planned is not None:
            # The last plan is copied out of memory that the next one overwrites; by now it hardly ever waits.
            self._planned.wait()
        lens = np.ones(num_rows, dtype=np.int32)
        lens[: len(context_lens)] = context_lens
        self._planned = self._stream.record() if self._attention.before_replay(lens) else None

    def _decode(self, extensions: Sequence[RowExtension], draws: torch.Tensor, starts: torch.Tensor) -> Tensors:
        """Run a whole decode step of n tokens by their packed draws, as a graph holds it. Lengths stay on the device.

        Args:
            extensions: add to its batch and to its logits.
            starts: [rows + 1] int32, the first token of each row; each has at most n / rows.
        """
        tables, n, rows = self._tables, len(draws), len(starts) - 1
        (token_ids, positions, slots), lens, page_table = decode_inputs(*places(draws), tables.pages, tables.tokens)
        windows = None
        if tables.window_pages is not None:
            reach = tables.window + n // rows - 1
            windows = BatchPages(*window_inputs(*places(draws), tables.window_pages, tables.page_size, reach))
        if n > rows:
            last = starts[1:].long() - 1
            lens, page_table = lens[last], page_table[last]
            windows = None if windows is None else BatchPages(windows.slots, windows.page_table[last])
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
            windows=windows,
        )
        for extend_decodes in hooks(extensions, RowExtension.extend_decodes):
            batch = extend_decodes(batch, places(draws)[0])
        return self._outputs_of(batch, draws, extensions)

    def _outputs_of(self, batch: ForwardBatch, draws: torch.Tensor, extensions: Sequence[RowExtension]) -> Tensors:
        """Return what a graph brings of a batch, a row for each token."""
        outputs = self._model.forward(batch, self._attention)
        logits = self._model.logits(outputs)
        for add_logits in hooks(extensions, RowExtension.add_logits):
            add_logits(outputs, logits, places(draws)[0], None)
        return logits, self._sampler.draw(logits, draws)
