"""Main program of the child that sends weights: a request a line on stdin, an answer on stdout.

    python -m rlcore.checkpoint_engine.sender_process gloo

Ends when stdin does, i.e. with its parent, whatever a library's threads are at.
"""

import json
import os
import sys
import threading
import traceback
from queue import Queue
from typing import Any

from rlcore.checkpoint_engine.base import TransferSettings
from rlcore.checkpoint_engine.sender import WeightSender
from rlcore.types import WeightMeta


def new_sender(backend: str) -> WeightSender:
    """Return the sending half of a transport; its library is imported here.

    Raises:
        ValueError: no such transport sends through a child.
    """
    if backend == "gloo":
        from rlcore.checkpoint_engine.gloo import GlooSender

        return GlooSender()
    if backend == "mooncake":
        from rlcore.checkpoint_engine.mooncake import MooncakeSender

        return MooncakeSender()
    raise ValueError(f"{backend} sends through no child")


def answer(sender: WeightSender, request: dict[str, Any]) -> Any:
    """Do what a request asks for and return its result."""
    if "close" in request:
        sender.close(request["close"])
        return None
    asked = request["open"]
    settings = TransferSettings(**asked["settings"])
    return sender.open(WeightMeta(**asked["meta"]), asked["replicas"], settings)


def main() -> None:
    """Serve the parent until it is gone."""
    # Libraries print what they like to descriptor 1: answers get one of their own.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    requests: Queue[str] = Queue()
    threading.Thread(target=_read, args=(requests,), daemon=True).start()
    sender = new_sender(sys.argv[1])
    print(json.dumps({"result": None}), file=answers, flush=True)
    while True:
        try:
            reply = {"result": answer(sender, json.loads(requests.get()))}
        except Exception as error:  # noqa: BLE001 - a transport may raise anything; it is reported
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), file=answers, flush=True)


def _read(requests: "Queue[str]") -> None:
    for line in sys.stdin:
        requests.put(line)
    os._exit(0)


if __name__ == "__main__":
    main()
