"""torch's store by which processes of a group find each other, on one address of this host."""

import socket

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]


def open_store(host: str) -> TCPStore:
    """Open a store on a free port of `host`; the process that holds it must live on.

    By itself torch listens on all interfaces, and asks nobody who he is.
    """
    listening = socket.create_server((host, 0))
    port = listening.getsockname()[1]
    return TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
    )
