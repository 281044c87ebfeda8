"""The benchmark of prefixes in fewer bits compares like with like, and counts what fits."""

import numpy as np
import pytest

from benchmarks import kv_precision
from tests.support.serving_samples import candidates, engine, history


def test_every_path_of_one_engine_agrees_and_precisions_differ(tmp_path):
    items, small = candidates(20).tolist(), engine(tmp_path, kv_precision="int8")
    exact, equal = kv_precision.rank_user(engine(tmp_path), history(60), items)
    rounded, also = kv_precision.rank_user(small, history(60), items)
    assert equal and also and kv_precision.largest(exact, rounded) > 0


def test_fewer_bits_fit_more_prefixes(tmp_path, monkeypatch):
    monkeypatch.setattr(kv_precision, "CACHE_BYTES", 8 << 20)
    counts = [
        kv_precision.prefixes_per_gb(engine(tmp_path, kv_precision=name))
        for name in ("fp32", "fp16", "int8")
    ]
    assert 1.7 < counts[1] / counts[0] < 2.2 and 2.5 < counts[2] / counts[0] < 4


def test_the_largest_difference_is_over_all_tasks():
    one = {"click": np.zeros(2), "like": np.zeros(2)}
    assert kv_precision.largest(one, {"click": np.zeros(2), "like": np.array([0.0, -0.5])}) == 0.5


@pytest.mark.slow
def test_the_quick_benchmark_runs():
    claims = kv_precision.run(quick=True)["claims"]
    assert claims["paths_equal"] == 1 and 0 < claims["score_diff_fp16"] < claims["score_diff_int8"]
