"""Main program of the child that sends weights: a request a line on stdin, an answer on stdout.

    python -m rlcore.checkpoint_engine.sender_process gloo

Ends when stdin does, i.e. with its parent, whatever a library's threads are at.
"""

import importlib
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

SENDERS = {
    "gloo": "rlcore.checkpoint_engine.gloo:GlooSender",
    "kimi_ckpt_engine": "rlcore.checkpoint_engine.kimi_sender:KimiSender",
    "mooncake": "rlcore.checkpoint_engine.mooncake:MooncakeSender",
    "nccl": "rlcore.checkpoint_engine.nccl:NcclSender",
}
"""The sending halves that ship, `module:Class`; only the one that is needed is imported."""


def new_sender(name: str) -> WeightSender:
    """Return the sending half of a transport; its library is imported here.

    Args:
        name: A key of SENDERS, or `module:Class`.

    Raises:
        ValueError: no such transport sends through a child.
    """
    module, colon, class_name = SENDERS.get(name, name).partition(":")
    if not colon:
        raise ValueError(f"{name} sends through no child")
    return getattr(importlib.import_module(module), class_name)()


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
