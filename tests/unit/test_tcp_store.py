"""Where ranks of training, and pairs of the gloo backend, meet."""

import psutil
import torch.distributed as dist

from rlcore.tcp_store import open_store


def test_the_store_listens_on_its_address_only():
    store = open_store("127.0.0.1")
    listening = {
        c.laddr.ip
        for c in psutil.Process().net_connections()
        if c.status == psutil.CONN_LISTEN and c.laddr.port == store.port
    }
    assert listening == {"127.0.0.1"}
    dist.TCPStore("127.0.0.1", store.port, is_master=False).set("key", "value")
    assert store.get("key") == b"value"
