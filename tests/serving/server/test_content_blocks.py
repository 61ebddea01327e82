"""The blocks of an answer are the same however its deltas were merged on their way."""

import random

from tokenmill.core.answer import AnswerPiece, PieceKind
from tokenmill.core.messages import TextOutput
from tokenmill.serving.frontend.generation import merge
from tokenmill.serving.server.generation.content_blocks import BlockBegins, BlockEnds, BlockGrows, ContentBlocks

# Two tokens of each, and what follows a call begins a block of its own.
PIECES = [
    AnswerPiece(PieceKind.REASONING, "h"),
    AnswerPiece(PieceKind.REASONING, "m"),
    AnswerPiece(PieceKind.TEXT, "s"),
    AnswerPiece(PieceKind.TEXT, "o"),
    AnswerPiece(PieceKind.CALL, "", "f"),
    AnswerPiece(PieceKind.CALL, '{"a":'),
    AnswerPiece(PieceKind.CALL, " 1}"),
    AnswerPiece(PieceKind.CALL, "{}", "g"),
    AnswerPiece(PieceKind.TEXT, "!"),
]
BLOCKS = [
    (PieceKind.REASONING, "", "hm"),
    (PieceKind.TEXT, "", "so"),
    (PieceKind.CALL, "f", '{"a": 1}'),
    (PieceKind.CALL, "g", "{}"),
    (PieceKind.TEXT, "", "!"),
]


def test_merged_deltas_make_the_same_blocks():
    rng = random.Random(5)
    for _ in range(200):
        deltas = [TextOutput("x", "", [1], 5, 0, answer=[piece]) for piece in PIECES]
        while len(deltas) > 1 and rng.random() < 0.8:
            at = rng.randrange(len(deltas) - 1)
            deltas[at : at + 2] = [merge(deltas[at : at + 2])]
        blocks = ContentBlocks()
        changes = [change for delta in deltas for change in blocks.add(delta)] + list(blocks.finish())
        assert [(block.kind, block.name, block.text) for block in blocks.blocks] == BLOCKS
        grown = ["".join(c.delta for c in changes if isinstance(c, BlockGrows) and c.block is b) for b in blocks.blocks]
        assert grown == [text for _, _, text in BLOCKS]
        order = [(type(c), c.block.index) for c in changes if not isinstance(c, BlockGrows)]
        assert order == [(kind, index) for index in range(len(BLOCKS)) for kind in (BlockBegins, BlockEnds)]


def test_a_whole_answer_has_its_text_before_its_calls():
    blocks = ContentBlocks()
    blocks.add_whole(merge([TextOutput("x", "", [1], 5, 0, answer=[piece]) for piece in PIECES]))
    assert [(block.name, block.text) for block in blocks.blocks] == [
        ("", "hm"), ("", "so!"), ("f", '{"a": 1}'), ("g", "{}"),
    ]  # fmt: skip


def test_an_answer_of_nothing_is_one_empty_text():
    blocks = ContentBlocks()
    assert [*blocks.add(TextOutput("x", "", [1], 5, 0)), *blocks.finish()]
    assert [(block.kind, block.text) for block in blocks.blocks] == [(PieceKind.TEXT, "")]
