"""Original ids become rows and come back, int64 and text alike; unknown ones are refused."""

import numpy as np
import pyarrow as pa
import pytest
import torch

from slipstream.errors import SlipstreamError
from slipstream.serving.engine.items import ItemIds
from slipstream.serving.id_arrays import whole_numbers
from slipstream.serving.request_errors import BadRequest

INT64_MAX = 2**63 - 1


def catalogue(path, ids):
    batch = pa.record_batch({"id": pa.array(ids)})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return ItemIds(path)


def test_text_ids(tmp_path):
    ids = catalogue(tmp_path / "items.arrow", ["a", "b", "ü"])
    assert ids.rows(["ü", "a"]).tolist() == [2, 0]
    assert ids.originals(torch.tensor([1])) == ["b"]
    with pytest.raises(BadRequest, match="'c'"):
        ids.rows(["c"])


def test_ids_up_to_the_largest_int64_are_exact(tmp_path):
    ids = catalogue(tmp_path / "items.arrow", [5, 2**53 + 1, INT64_MAX])
    assert ids.rows([INT64_MAX, 2**53 + 1]).tolist() == [2, 1]
    assert ids.originals(torch.tensor([1, 2])) == [2**53 + 1, INT64_MAX]
    with pytest.raises(BadRequest, match=str(2**53)):
        ids.rows([2**53])
    sent = np.array([INT64_MAX, 6, 5, INT64_MAX - 1])
    assert ids.contains(sent).tolist() == [True, False, True, False]


@pytest.mark.parametrize("values", [[1.5], [True], [2**63], np.array([1.0]), [[1]], ["1"]])
def test_what_is_no_whole_number_is_refused(values):
    with pytest.raises(BadRequest, match="ids must be"):
        whole_numbers("ids", values)


def test_whole_numbers_of_any_kind_become_int64():
    for values in ([1, 2], np.array([1, 2], dtype=np.uint64), torch.tensor([1, 2])):
        assert whole_numbers("ids", values).tolist() == [1, 2]


def test_a_vocabulary_that_cannot_be_read_says_what_to_do(tmp_path):
    (tmp_path / "items.arrow").write_bytes(b"not arrow")
    with pytest.raises(SlipstreamError, match="export the bundle again"):
        ItemIds(tmp_path / "items.arrow")
