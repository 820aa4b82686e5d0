"""Steps as shapes: what they read and how much of it is shared."""

from headrace.bench.cells import Cell


def test_a_decode_step() -> None:
    cell = Cell(name="", num_seqs=2, start=31)
    assert (cell.context, cell.num_step_tokens, cell.num_blocks) == (32, 2, 4)
    assert (cell.num_kv_tokens, cell.num_pairs) == (64, 64)
    batch = cell.batch()
    assert batch.block_tables == [[0, 1], [2, 3]]
    assert (batch.token_starts, batch.positions, batch.logit_rows) == ([0, 1, 2], [31, 31], [0, 1])


def test_a_chunk_sees_what_came_before_and_itself() -> None:
    cell = Cell(name="", num_tokens=3, start=10)
    assert cell.num_pairs == 11 + 12 + 13
    assert cell.num_kv_tokens == 13
    assert cell.batch().logit_rows == [2]


def test_shared_tokens_are_in_the_same_blocks_and_read_once() -> None:
    cell = Cell(name="", num_seqs=3, start=32, num_shared_tokens=32)
    assert cell.batch().block_tables == [[0, 1, 2], [0, 1, 3], [0, 1, 4]]
    assert (cell.num_blocks, cell.num_kv_tokens) == (5, 32 + 3)
    assert cell.num_pairs == 3 * 33
