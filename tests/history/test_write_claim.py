"""A write is committed or withdrawn, whoever comes first."""

import pytest

from slipstream.history.write_claim import WithdrawnError, WriteClaim


def test_a_withdrawn_write_is_not_committed():
    claim = WriteClaim()
    claim.check()
    assert claim.withdraw() and claim.withdraw()
    for step in (claim.check, claim.commit):
        with pytest.raises(WithdrawnError):
            step()


def test_a_write_that_is_being_committed_cannot_be_withdrawn():
    claim = WriteClaim()
    claim.commit()
    assert not claim.withdraw()
    claim.check()
