"""`slipstream client reload`, `traffic`, `drain` …: what operators ask of a running server.

Touch this when an admin endpoint gets a command or a flag.
"""

from typing import TYPE_CHECKING, Annotated

import typer

from slipstream.cli.connection import DEFAULT_URL, AsJson, Url, console, open_client

if TYPE_CHECKING:
    from slipstream.serving.http import messages, version_messages


def reload(
    url: Url = DEFAULT_URL,
    version: Annotated[str | None, typer.Option(help="The version expected.")] = None,
    share: Annotated[
        float,
        typer.Option(min=0, max=1, help="Share of the users; below 1 it is a candidate (canary)."),
    ] = 1.0,
    shadow: Annotated[
        float,
        typer.Option(min=0, max=1, help="Share of other rankings that it scores, unanswered."),
    ] = 0.0,
) -> None:
    """Serve what the bundle's directory holds now; where that fails, nothing has changed.

    Example: slipstream client reload --share 0.05 --shadow 0.2
    """
    with open_client(url, admin=True) as connection:
        _show_change(connection.reload(version, share, shadow), connection.versions())


def traffic(
    url: Url = DEFAULT_URL,
    share: Annotated[
        float | None, typer.Option(min=0, max=1, help="The candidate's share of the users.")
    ] = None,
    shadow: Annotated[
        float | None, typer.Option(min=0, max=1, help="Share of rankings it scores, unanswered.")
    ] = None,
) -> None:
    """Change how many users get the candidate; who has it keeps it while the share grows.

    Example: slipstream client traffic --share 0.2
    """
    with open_client(url, admin=True) as connection:
        _show_change(connection.traffic(share, shadow), connection.versions())


def promote(url: Url = DEFAULT_URL) -> None:
    """Serve the candidate to all users."""
    with open_client(url, admin=True) as connection:
        _show_change(connection.traffic(share=1.0), connection.versions())


def rollback(url: Url = DEFAULT_URL) -> None:
    """Drop the candidate; without one, serve the version before."""
    with open_client(url, admin=True) as connection:
        _show_change(connection.rollback(), connection.versions())


def versions(as_json: AsJson = False, url: Url = DEFAULT_URL) -> None:
    """Show which versions the instances serve, and to whom."""
    with open_client(url, admin=True) as connection:
        answer = connection.versions()
    if as_json:
        import msgspec

        typer.echo(msgspec.json.encode(answer).decode())
    else:
        _show_versions(answer)


def _show_change(changed: "messages.ReloadAnswer", now: "version_messages.VersionsAnswer") -> None:
    for name, after in changed.after.items():
        console.print(f"{name}: {changed.before[name]} → {after}")
    if any(record.candidate for record in now.instances.values()):
        _show_versions(now)


def _show_versions(answer: "version_messages.VersionsAnswer") -> None:
    for name, record in sorted(answer.instances.items()):
        line = f"{name}: {record.stable}"
        if record.candidate is not None:
            line += f", candidate {record.candidate} for {record.share:.1%} of the users, "
            line += f"{record.shadow:.1%} in the shadow"
        console.print(line)


def drain(
    instance: Annotated[str, typer.Argument(help="The instance, for example i-0.")],
    url: Url = DEFAULT_URL,
) -> None:
    """Take an instance out of service: it finishes what it has."""
    with open_client(url, admin=True) as connection:
        console.print(f"{connection.drain(instance).draining} is draining")


def undrain(
    instance: Annotated[str, typer.Argument(help="The instance, for example i-0.")],
    url: Url = DEFAULT_URL,
) -> None:
    """Take a drained instance back into service."""
    with open_client(url, admin=True) as connection:
        console.print(f"{connection.undrain(instance).serving} takes requests again")
