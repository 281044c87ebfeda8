"""Every counter is there from the start, and gauges follow what the instance holds."""

from tests.support.serving_instance import instance, run, soon
from tests.support.serving_samples import candidates, history


def test_counters_begin_at_zero_and_gauges_follow_the_cache(tmp_path):
    _, served = instance(tmp_path, host_path=tmp_path / "shelf")
    before = served.stats()
    for name in ("hit_device", "hit_inline", "refused_no_room", "prefixes_computed", "batched"):
        assert before[name] == 0
    assert (
        before["host_entries"] == before["device_entries"] == before["outstanding_behaviours"] == 0
    )
    run(served.rank("u", history(300), candidates(5), deadline=soon()))
    after = served.stats()
    assert after["hit_inline"] == after["prefixes_computed"] == after["device_entries"] == 1
    assert 0 < after["device_bytes"] <= after["device_budget_bytes"]
    assert after["busy_seconds_rank"] > 0 and after.keys() >= before.keys()
    served.close()


def test_without_a_host_tier_nothing_is_said_of_it(tmp_path):
    _, served = instance(tmp_path)
    assert not [name for name in served.stats() if name.startswith("host_")]
    served.close()
