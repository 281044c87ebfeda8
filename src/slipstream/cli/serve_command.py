"""`slipstream serve`: a bundle behind HTTP.

Touch this when the server gets another flag; the work is in serving/.
"""

import logging
import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from slipstream.cli.connection import (
    ADMIN_KEY_VARIABLE,
    DEFAULT_URL,
    KEY_VARIABLE,
    console,
    need_serving_extra,
)
from slipstream.cli.settings_file import use_settings_file
from slipstream.errors import SlipstreamError

log = logging.getLogger("slipstream.serving")
LOOPBACK = ("127.0.0.1", "::1", "localhost")


def serve(
    bundle: Annotated[
        Path | None,
        typer.Argument(help="A bundle made by `slipstream export`.", show_default=False),
    ] = None,
    retrieval: Annotated[
        Path | None,
        typer.Option(help="A bundle that retrieves what another one ranks; see --ranking."),
    ] = None,
    ranking: Annotated[
        Path | None, typer.Option(help="The bundle that ranks, with --retrieval.")
    ] = None,
    search: Annotated[
        str,
        typer.Option(
            help="How a catalogue is searched: exact, or approximately by an index of the extra "
            "`faiss`: hnsw, ivf."
        ),
    ] = "exact",
    instances: Annotated[
        int,
        typer.Option(
            min=0, max=256, help="Instances, each with its own --threads; 0: those of --peers only."
        ),
    ] = 1,
    threads: Annotated[int, typer.Option(min=1, max=256, help="Torch threads of an instance.")] = 1,
    routers: Annotated[
        int,
        typer.Option(
            min=0, max=64, help="Router processes on the same port; 0: with --listen-instances."
        ),
    ] = 1,
    listen_instances: Annotated[
        str | None,
        typer.Option(
            help="HOST:PORT where routers of other machines reach the instances, each at the next "
            "port; needs $SLIPSTREAM_CLUSTER_KEY or --cluster-key-file."
        ),
    ] = None,
    peers: Annotated[
        list[str] | None,
        typer.Option(
            help="Instances of other machines: a file (YAML or JSON lines of name, url, pool), or "
            "dns:NAME:PORT, each address an instance. Followed while serving; repeatable."
        ),
    ] = None,
    machine: Annotated[
        str | None,
        typer.Option(
            help="Name of this machine among several, before the names of its instances; the "
            "host's unless given."
        ),
    ] = None,
    cluster_key_file: Annotated[
        Path | None,
        typer.Option(
            help="File with the key that all machines share, readable by its owner only; or "
            "$SLIPSTREAM_CLUSTER_KEY."
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; beyond loopback an API key is required.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")
    ] = 8000,
    history: Annotated[
        str,
        typer.Option(
            help="History store: sqlite:PATH or redis://HOST:PORT/DB; with a password only in the "
            "environment or the settings file.",
            envvar="SLIPSTREAM_HISTORY",
        ),
    ] = "sqlite:history.db",
    key_file: Annotated[
        Path | None,
        typer.Option(
            help="File of API keys, a line each: the key, then role=admin, tenant=NAME, rate=N. Or "
            f"${KEY_VARIABLE} for clients and ${ADMIN_KEY_VARIABLE} for operators."
        ),
    ] = None,
    tls_cert: Annotated[
        Path | None, typer.Option(help="PEM certificate (chain): serve HTTPS. Needs --tls-key.")
    ] = None,
    tls_key: Annotated[
        Path | None, typer.Option(help="PEM key of the certificate, without a passphrase.")
    ] = None,
    connections: Annotated[
        int, typer.Option(min=1, max=1_000_000, help="Connections of a router, in all.")
    ] = 4_096,
    connections_per_peer: Annotated[
        int,
        typer.Option(
            min=1,
            max=1_000_000,
            help="Connections of a router from one address; behind a proxy: as --connections.",
        ),
    ] = 256,
    deadline_ms: Annotated[
        float, typer.Option(min=1, max=60_000, help="Deadline of requests that bring none.")
    ] = 1_000.0,
    rate: Annotated[
        float | None,
        typer.Option(min=0.001, help="Requests per second and caller; no limit unless given."),
    ] = None,
    burst: Annotated[
        int, typer.Option(min=1, help="Requests a caller may send at once, with --rate.")
    ] = 100,
    long_from: Annotated[
        int | None, typer.Option(min=1, help="Behaviours from which a request is long; see --long.")
    ] = None,
    long: Annotated[
        int, typer.Option(min=0, help="Instances kept for long requests, with --long-from.")
    ] = 0,
    state: Annotated[
        Path | None,
        typer.Option(
            help="Directory of the key that signs tickets; $XDG_STATE_HOME/slipstream unless given."
        ),
    ] = None,
    drain_seconds: Annotated[
        float, typer.Option(min=0.1, max=600, help="Time to finish requests at the end.")
    ] = 10.0,
    hang_seconds: Annotated[
        float,
        typer.Option(min=0.5, max=600, help="A process that does not move for so long is killed."),
    ] = 2.5,
    log_format: Annotated[
        Literal["text", "json"], typer.Option(help="Log lines for people, or one JSON object each.")
    ] = "text",
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], typer.Option(help="Which lines are logged.")
    ] = "info",
    log_requests: Annotated[
        Literal["none", "failed", "all"],
        typer.Option(help="Which requests are logged: failed are those of status 500 and above."),
    ] = "failed",
    traces: Annotated[
        str | None,
        typer.Option(help="Send OpenTelemetry traces there: http://HOST:4318/v1/traces."),
    ] = None,
    trace_share: Annotated[
        float, typer.Option(min=0, max=1, help="Share of the requests that begin a trace here.")
    ] = 0.01,
    check: Annotated[
        bool, typer.Option("--check", help="Check everything a start needs, and end.")
    ] = False,
    settings: Annotated[
        Path | None,
        typer.Option(
            is_eager=True,
            callback=use_settings_file,
            help="YAML file of these flags by name, such as `deadline-ms: 200`; flags go first.",
        ),
    ] = None,
    slo_ms: Annotated[
        float,
        typer.Option(
            min=1, max=60_000, help="Time ranking may take: what needs more is pre-inferred."
        ),
    ] = 80.0,
    device_mb: Annotated[
        int, typer.Option(min=1, help="MiB of prefixes that an instance keeps to rank behind.")
    ] = 512,
    host_mb: Annotated[
        int,
        typer.Option(min=0, help="MiB of shared memory for used prefixes of an instance; 0: none."),
    ] = 512,
    kv: Annotated[
        Literal["fp32", "fp16", "int8"],
        typer.Option(
            help="How keys and values of prefixes are stored: fp32 is exact, fp16 halves and int8 "
            "quarters their size; scores then differ a little from fp32's."
        ),
    ] = "fp32",
    relay: Annotated[
        bool, typer.Option(help="Keep prefixes. --no-relay: rank in line, at the least busy.")
    ] = True,
    preinfer: Annotated[
        bool, typer.Option(help="Compute prefixes ahead, when a ranking is announced.")
    ] = True,
    page: Annotated[
        bool, typer.Option(help="Show the web page at /. It needs no key; what it asks for does.")
    ] = True,
    allow_kill: Annotated[
        bool,
        typer.Option("--allow-kill", help="Let instances be killed over HTTP; on loopback only."),
    ] = False,
    trigger: Annotated[
        bool, typer.Option(help="Compute ahead only what is at risk, fits and does not overload.")
    ] = True,
) -> None:
    """Serve a bundle over HTTP: instances behind a router.

    Ctrl-C or SIGTERM finishes the running requests, then ends.

    Example: slipstream serve bundles/ml-1m --instances 2
    """
    need_serving_extra()
    from slipstream.serving.cluster_config import describe_peers, read_cluster
    from slipstream.serving.instance.instance_config import instance_settings
    from slipstream.serving.logs import configure_logs
    from slipstream.serving.start_checks import (
        check_bundle_apart,
        check_search,
        check_traces,
        find_store_fault,
        show_checks,
    )
    from slipstream.serving.supervisor import DeploymentConfig, Supervisor
    from slipstream.serving.ticket_key import state_directory
    from slipstream.ui import page_directory

    refuse_typed_password(history)
    keys = read_keys(key_file)
    cluster = read_cluster(
        listen=listen_instances,
        peers=peers or [],
        machine=machine,
        key_file=cluster_key_file,
        history=history,
        instances=instances,
        routers=routers,
    )
    if routers and host not in LOOPBACK and not keys:
        raise SlipstreamError(
            f"listening on {host} without an API key would serve anybody; set ${KEY_VARIABLE} or "
            "give --key-file"
        )
    certificate = read_certificate(tls_cert, tls_key)
    if allow_kill and host not in LOOPBACK:
        raise SlipstreamError(f"--allow-kill is for trying things on loopback, not on {host}")
    if long and (long_from is None or long >= instances):
        raise SlipstreamError(
            "--long needs --long-from, and leaves at least one instance for short requests"
        )
    check_search(search)
    if instances:
        bundle = _ranking_bundle(bundle, retrieval, ranking)
        check_bundle_apart(bundle)
    elif bundle or retrieval or ranking:
        raise SlipstreamError("--instances 0 opens no bundle; name none")
    if retrieval is not None:
        check_bundle_apart(retrieval, "retrieval")
    check_traces(traces)
    if check:
        for sentence in describe_peers(peers or []):
            console.print(sentence)
        show_checks(history if instances else None, host, port, instances * host_mb, console.print)
        return
    configure_logs("supervisor", log_format, log_level, sys.stdout)
    fault = find_store_fault(history) if instances else None
    if fault is not None:
        log.warning("%s; until then requests that send no history get 503", fault)
    model = instance_settings(
        threads=threads,
        device_mb=device_mb,
        host_mb=host_mb,
        kv=kv,
        slo_ms=slo_ms,
        relay=relay,
        preinfer=preinfer,
        trigger=trigger,
        search=search,
    )
    bundles = {"bundle": str(bundle), "retrieval": None if retrieval is None else str(retrieval)}
    plan = DeploymentConfig(
        instances,
        {
            **bundles,
            "history": history,
            "deadline_ms": deadline_ms,
            "allow_kill": allow_kill,
            "model": model,
        },
        routers=routers,
        host=host,
        port=port,
        router_settings={
            "deadline_ms": deadline_ms,
            "requests_per_second": rate,
            "burst": burst,
            "long_from": long_from,
            "affinity": relay,
            "connections": {"total": connections, "per_peer": connections_per_peer},
            "alone": routers == 1 and cluster is None,
            "allow_kill": allow_kill,
            "page": str(page_directory()) if page else None,
        },
        tls=certificate,
        api_keys=keys,
        pools=tuple("long" if number < long else "short" for number in range(instances))
        if long
        else (),
        drain_seconds=drain_seconds,
        hang_seconds=hang_seconds,
        cluster=cluster,
        state=state or state_directory(),
        observation={
            "log_format": log_format,
            "log_level": log_level,
            "log_requests": log_requests,
            "traces": traces,
            "trace_share": trace_share,
        },
    )
    supervisor = Supervisor(plan, log.info)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, supervisor.stop)
    hint = "" if supervisor.url == DEFAULT_URL else f" --url {supervisor.url}"
    shown = str(bundle) if retrieval is None else f"{retrieval} before {bundle}"
    if routers:
        log.info(
            f"serving {shown if instances else 'peers'} at {supervisor.url} ({instances} "
            f"instances; Ctrl-C ends); try: slipstream client health{hint}"
        )
    supervisor.run()
    log.info("every request under way was finished; goodbye")


def _ranking_bundle(bundle: Path | None, retrieval: Path | None, ranking: Path | None) -> Path:
    """Return the bundle that ranks, named alone or by --ranking."""
    if bundle is not None and ranking is None:
        return bundle
    if ranking is not None and bundle is None and retrieval is not None:
        return ranking
    raise SlipstreamError(
        "name one bundle, as in `slipstream serve bundles/ml-1m`, or two: --retrieval A --ranking B"
    )


def read_keys(key_file: Path | None) -> tuple[str, ...]:
    """Read API keys from a file or the environment, as lines of a key file.

    They are never taken from the command line, which every user of the machine can read.
    """
    from slipstream.serving.http.api_keys import parse_keys, read_key_file

    lines = () if key_file is None else read_key_file(key_file)
    if key_file is None:
        lines = tuple(key for key in os.environ.get(KEY_VARIABLE, "").split(",") if key)
    admins = (key for key in os.environ.get(ADMIN_KEY_VARIABLE, "").split(",") if key)
    lines = (*lines, *(f"{key} role=admin" for key in admins))
    parse_keys(lines)
    return lines


def read_certificate(certificate: Path | None, key: Path | None) -> tuple[str, str] | None:
    """Check the files of a certificate and its key; None where there are none."""
    from slipstream.serving.http.acceptor import CertificateFiles
    from slipstream.serving.http.api_keys import read_secret_file

    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        raise SlipstreamError("HTTPS needs both --tls-cert and --tls-key")
    read_secret_file(key, "TLS key")
    files = str(certificate.absolute()), str(key.absolute())
    CertificateFiles(*files)
    return files


def refuse_typed_password(url: str) -> None:
    """Refuse a password in the command line, which every user of the machine can read."""
    from slipstream.history.history_store import url_without_password

    if url != url_without_password(url) and any(url in word for word in sys.argv):
        raise SlipstreamError(
            "every user of this machine can read a password in the command line; put the "
            "address in $SLIPSTREAM_HISTORY or in the settings file instead of --history"
        )
