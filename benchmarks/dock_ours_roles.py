"""The processes beside our producer: `dock_ours_roles.py server` and `dock_ours_roles.py consumer`."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import dock_calls as calls
from dock_load import digest
from dock_measure import now, own_traffic
from dock_process import serve

from mindspeed_asyncflow.dock.server import DockServer

GRANT = 8  # rows of one metadata request


class Server:
    def __init__(self) -> None:
        self.server: DockServer | None = None

    def start(self, kind: str, payload_bytes: int, host: str = "127.0.0.1", pair: int = 0) -> str:
        self.server = calls.serve(kind, payload_bytes, host, pair).start()
        return self.server.address

    def files(self) -> int:
        """Bytes of the files that the server keeps beside its arena."""
        assert self.server is not None
        arena = Path(self.server.arena_path)
        beside = [path for path in arena.parent.glob(arena.name + "*") if path != arena]
        return sum(path.stat().st_blocks * 512 for path in beside)

    def stop(self) -> None:
        server, self.server = self.server, None
        if server is None:
            return
        server.close()
        if server.failure is not None:
            raise RuntimeError(f"the server's thread ended: {server.failure!r}")


class Consumer:
    def connect(self, addresses: list[str], mapped: bool, home: int = 0) -> None:
        self.client = calls.connect(addresses, mapped, home)

    def close(self) -> None:
        self.client.close()

    def drain(
        self, partition: str, rows: int, puts: int, columns: list[str], copy: bool, check: bool
    ) -> dict[str, Any]:
        """`puts` batches of `rows`. `get_s`: claims and values in hand; `done_s`: saying that they are used."""
        get_s = done_s = 0.0
        nbytes = found = 0
        for _ in range(puts):
            began = now()
            taken = calls.take(self.client, partition, rows, columns, "consumer", rows)
            if copy:
                copies = taken.copies()
            else:
                taken.touch()
            had = now()
            calls.finish(self.client, taken)
            done_s += now() - had
            get_s += had - began
            nbytes += taken.nbytes
            if check:
                found += sum(digest(v) for v in (copies if copy else taken.copies()).values())
        return {"get_s": get_s, "done_s": done_s, "end": now(), "nbytes": nbytes, "digest": found}

    def drain_sealed(self, partition: str, rows: int, columns: list[str]) -> dict[str, Any]:
        """Whatever is there, until the end of the sealed partition."""
        got = nbytes = 0
        while len((taken := calls.take(self.client, partition, rows, columns, "consumer", 1)).rows):
            taken.touch()
            calls.finish(self.client, taken)
            got += len(taken.rows)
            nbytes += taken.nbytes
        return {"rows": got, "nbytes": nbytes}

    def arrivals(self, partition: str, count: int, columns: list[str]) -> list[float]:
        """Seconds from the beginning of the put to the values in hand, of `count` rows that are waited for."""
        seconds = []
        for _ in range(count):
            taken = calls.take(self.client, partition, 1, columns, "consumer", 1)
            taken.touch()
            seconds.append(now() - float(taken.values["sent"][0]))
            calls.finish(self.client, taken)
        return seconds

    def grants(self, partition: str, task: str, count: int, start: float = 0.0) -> dict[str, float]:
        """`count` metadata requests from the time `start` on; when they began and ended."""
        time.sleep(max(0.0, start - now()))
        began = now()
        for _ in range(count):
            got = calls.grant(self.client, partition, task, GRANT)
            if got != GRANT:
                raise RuntimeError(f"a grant of {got} rows instead of {GRANT}")
        return {"began": began, "ended": now()}


def main(role: str) -> None:
    if role == "server":
        server = Server()
        serve({"start": server.start, "stop": server.stop, "files": server.files, "traffic": own_traffic})
        server.stop()  # where the parent has failed, its memory must not stay
    else:
        consumer = Consumer()
        names = ("connect", "close", "drain", "drain_sealed", "arrivals", "grants")
        serve({name: getattr(consumer, name) for name in names})


if __name__ == "__main__":
    main(sys.argv[1])
