"""Messages of the admin endpoints about versions: reload, traffic, rollback.

Touch this when one of them says something else; the record itself is in serving/versions.py.
"""

from typing import Annotated

import msgspec

from slipstream.serving.versions import VersionRecord

Share = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]


class TrafficRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Change the candidate's share of the users, or of shadow scoring; a share of 1 promotes it."""

    share: Share | None = None
    shadow: Share | None = None


class RollbackRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Drop the candidate; where there is none, go back to the version before."""


class PrepareRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Open the version that the bundle's directory holds, beside those that are served."""

    version: str | None = None  # the one expected


class PrepareAnswer(msgspec.Struct):
    """The version that is open and warm."""

    version: str


class VersionsAnswer(msgspec.Struct):
    """What each instance serves."""

    instances: dict[str, VersionRecord]
