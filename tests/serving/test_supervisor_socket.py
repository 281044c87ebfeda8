"""What instances ask of their supervisor: pin a version, keep the record, know of changes."""

from pathlib import Path

import pytest

from slipstream.errors import SlipstreamError
from slipstream.serving.supervisor_socket import (
    SupervisedVersions,
    UnpinnedVersions,
    VersionKeeper,
)
from slipstream.serving.versions import VersionRecord
from tests.support.serving_stand_in import read_standin_version, write_standin_bundle


def test_a_version_is_pinned_recorded_and_followed(tmp_path: Path):
    write_standin_bundle(tmp_path / "bundle", "v1")
    lines: list[str] = []
    (tmp_path / "shelf").mkdir()
    keeper = VersionKeeper(tmp_path / "bundle", tmp_path / "shelf", lines.append)
    try:
        asking, other = (SupervisedVersions(tmp_path / "shelf") for _ in range(2))
        assert asking.read() == other.changed() == VersionRecord("v1")
        assert other.changed() is None
        write_standin_bundle(tmp_path / "bundle", "v2")
        assert asking.pin() == "v2" and asking.read().stable == "v1"
        record = asking.read().with_version("v2", 1.0, 0.0)
        asking.keep(record)
        asking.keep(record)  # as every instance of a deployment does
        assert other.changed() == record and lines == ["serving version v2 instead of v1"]
        assert read_standin_version(asking.path("v1")) == "v1", "kept for a rollback"
        write_standin_bundle(tmp_path / "bundle", "v3")
        asking.pin()
        canary = record.with_version("v3", 0.1, 0.0)
        asking.keep(canary)
        assert "candidate v3 beside v2: 10.0% of the users" in lines[-1]
        asking.keep(canary.rolled_back())
        assert lines[-1] == "the candidate v3 is no longer served"
        asking.keep(VersionRecord("v1", number=1))  # an older record changes nothing
        assert asking.read().stable == "v2"
        with pytest.raises(SlipstreamError, match="v9 is not pinned"):
            asking.keep(VersionRecord("v9", number=99))
        assert (tmp_path / "shelf" / "supervisor.sock").stat().st_mode & 0o777 == 0o600
        assert keeper.answer(b"not json").error
    finally:
        keeper.close()
    with pytest.raises(SlipstreamError, match="the supervisor does not answer"):
        asking.pin()


def test_without_a_supervisor_the_directory_decides(tmp_path: Path):
    write_standin_bundle(tmp_path / "bundle", "v1")
    versions = UnpinnedVersions(lambda: read_standin_version(tmp_path / "bundle"), tmp_path)
    write_standin_bundle(tmp_path / "bundle", "v2")
    assert (versions.read().stable, versions.pin(), versions.changed()) == ("v1", "v2", None)
    versions.keep(versions.read().with_version("v2", 1.0, 0.0))
    assert versions.read().stable == "v2" and versions.path("v2") == tmp_path
