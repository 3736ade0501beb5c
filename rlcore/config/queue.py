"""Section `transfer_queue`: where trajectories wait between generation and training."""

from typing import Annotated, Literal

from pydantic import Field

from rlcore.config.base import Bytes, Count, Port, Processes, Section
from rlcore.config.pending import PROMETHEUS, QUEUE_ALWAYS, STORAGE, STORAGE_SIZE, STORAGE_UNUSED


class SimpleStorageConfig(Section):
    """Rows in the memory of Ray actors."""

    total_storage_size: Count | None = Field(default=None, ge=1)
    """Rows at most: claims of prompts wait while it might be exceeded; null: no limit (verl:
    100000)."""
    num_data_storage_units: Annotated[Processes, STORAGE_SIZE] = Field(default=8, ge=1)
    """Processes that hold them."""


class MooncakeStoreConfig(Section):
    """Rows in a Mooncake store."""

    auto_init: bool = False
    """Start its servers."""
    metadata_server: str = "localhost:50123"
    """Address of its metadata server."""
    master_server_address: str = "localhost:50124"
    """Address of its master."""
    local_hostname: str = "localhost"
    """Name of this host for the others."""
    protocol: Literal["tcp", "rdma"] = "tcp"
    """How bytes travel."""
    global_segment_size: Bytes = Field(default=4 * 1024**3, ge=1)
    """Memory that each process gives to the store."""
    local_buffer_size: Bytes = Field(default=1024**3, ge=1)
    """Memory for transfers of each process."""
    device_name: str = ""
    """Network device of rdma; empty: any."""


class QueueBackendConfig(Section):
    """Where rows lie."""

    storage_backend: Annotated[Literal["SimpleStorage", "MooncakeStore"], STORAGE] = "SimpleStorage"
    """`SimpleStorage`: memory of Ray actors."""
    SimpleStorage: SimpleStorageConfig = Field(default_factory=SimpleStorageConfig)
    """Its size."""
    MooncakeStore: Annotated[MooncakeStoreConfig, STORAGE_UNUSED] = Field(
        default_factory=MooncakeStoreConfig
    )
    """Its size and servers."""


class QueueMetricsConfig(Section):
    """Metrics of the queue for Prometheus."""

    enabled: bool = False
    """Serve them."""
    port: Port = Field(default=0, ge=0, le=65535)
    """Port; 0: any free one."""


class TransferQueueConfig(Section):
    """TransferQueue, through which every trajectory goes."""

    enable: Annotated[bool, QUEUE_ALWAYS] = False
    """verl's switch, which its V1 forces to true."""
    backend: QueueBackendConfig = Field(default_factory=QueueBackendConfig)
    """Where rows lie."""
    metrics: Annotated[QueueMetricsConfig, PROMETHEUS] = Field(default_factory=QueueMetricsConfig)
    """Metrics for Prometheus."""
