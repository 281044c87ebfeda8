"""Connections are counted before anything is spent on them; TLS comes from certificate files."""

import asyncio
import os
import shutil
import ssl
from pathlib import Path

import pytest

from slipstream.errors import SlipstreamError
from slipstream.serving.http import acceptor
from slipstream.serving.http.acceptor import CertificateFiles
from tests.support.http_connections import bounded_server, read_all, run, self_signed, until

LAST = b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"


def test_a_peer_with_too_many_connections_is_told_so_and_another_is_served():
    async def work() -> None:
        async with bounded_server(per_peer=3) as server:
            held = [await server.connect("127.0.0.2") for _ in range(3)]
            await until(lambda: server.table.open == 3)
            refused = [await server.ask(source="127.0.0.2") for _ in range(20)]
            assert all(b"503" in answer and b"too_many_connections" in answer for answer in refused)
            assert b" 200 " in await server.ask(LAST, source="127.0.0.3")
            held[0][1].close()
            await until(lambda: server.table.open == 2)
            assert b" 200 " in await server.ask(LAST, source="127.0.0.2")
            for _, writer in held[1:]:
                writer.close()
            await until(lambda: server.table.open == 0)

    run(work)


def test_connections_in_all_are_bounded():
    async def work() -> None:
        async with bounded_server(total=2) as server:
            held = [await server.connect(f"127.0.0.{number}") for number in (2, 3)]
            await until(lambda: server.table.open == 2)
            assert b"503" in await server.ask(LAST, source="127.0.0.4")
            for _, writer in held:
                writer.close()

    run(work)


def test_a_process_without_files_pauses_and_goes_on(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(acceptor, "PAUSE_SECONDS", 0.05)

    async def work() -> None:
        async with bounded_server() as server:
            real, fails = acceptor.Acceptor._accept, [True]

            def out_of_files(self: acceptor.Acceptor) -> None:
                class Socket:
                    def accept(self) -> None:
                        raise OSError(24, "Too many open files")

                    fileno = self._socket.fileno

                if fails.pop() if fails else False:
                    kept, self._socket = self._socket, Socket()  # type: ignore[assignment]
                    real(self)
                    self._socket = kept
                else:
                    real(self)

            monkeypatch.setattr(acceptor.Acceptor, "_accept", out_of_files)
            assert b" 200 " in await server.ask(LAST)

    run(work)


def trusting(certificate: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(certificate))


def test_tls_answers_and_a_renewed_certificate_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(acceptor, "CERTIFICATE_SECONDS", 0.02)
    certificate, key = self_signed(tmp_path)
    (tmp_path / "next").mkdir()
    renewed = self_signed(tmp_path / "next")
    shutil.copy(certificate, tmp_path / "old.pem")

    async def asked(server, context: ssl.SSLContext) -> bytes:
        reader, writer = await server.connect(context=context)
        writer.write(LAST)
        try:
            return await read_all(reader)
        finally:
            writer.close()

    async def work() -> None:
        async with bounded_server(CertificateFiles(str(certificate), str(key))) as server:
            assert b" 200 " in await asked(server, trusting(tmp_path / "old.pem"))
            assert b" 200 " not in await server.ask(LAST)  # plain HTTP
            os.replace(renewed[1], key)
            os.replace(renewed[0], certificate)
            new = trusting(certificate)

            async def is_new() -> bool:
                try:
                    return b" 200 " in await asked(server, new)
                except ssl.SSLError:
                    return False

            async with asyncio.timeout(60):
                while not await is_new():
                    await asyncio.sleep(0.02)
            with pytest.raises(ssl.SSLError):
                await asked(server, trusting(tmp_path / "old.pem"))
            await until(lambda: server.table.open == 0)

    run(work)


def test_handshakes_are_bounded_in_number_and_time(tmp_path: Path):
    certificate = CertificateFiles(*map(str, self_signed(tmp_path)))

    async def work() -> None:
        async with bounded_server(certificate, per_peer=2, head_seconds=0.3) as server:
            held = [await server.connect("127.0.0.2") for _ in range(5)]  # say nothing
            for reader, writer in held:
                assert b"200" not in await read_all(reader)
                writer.close()
            await until(lambda: server.table.open == 0)
            assert server.table.counts["handshakes_failed"] == 2
            assert server.table.counts["connections_refused_peer"] == 3

    run(work)


def test_files_that_are_no_certificate_are_explained(tmp_path: Path):
    certificate, key = self_signed(tmp_path)
    key.write_text("no key")
    with pytest.raises(SlipstreamError, match="give a PEM certificate and its unencrypted key"):
        CertificateFiles(str(certificate), str(key))
    with pytest.raises(SlipstreamError, match="No such file"):
        CertificateFiles(str(tmp_path / "none.pem"), str(key))
