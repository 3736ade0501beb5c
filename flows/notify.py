"""Tell somebody: what the notifying automations start."""

from prefect import flow, get_run_logger
from prefect.blocks.abstract import NotificationBlock
from prefect.blocks.core import Block


@flow(name="notify", flow_run_name="{subject}", retries=2, retry_delay_seconds=10,
      persist_result=False)  # fmt: skip
async def notify(subject: str, body: str, block: str | None = None) -> None:
    """Write a message to the log, and send it.

    Args:
        subject: One line.
        body: What happened.
        block: A notification block of Prefect's (`slack-webhook/team`); none: the log alone, where
            the run's page and its logs are the message.

    Raises:
        TypeError: the block cannot notify.
    """
    get_run_logger().warning("%s: %s", subject, body)
    if block is None:
        return
    channel = await Block.aload(block)
    if not isinstance(channel, NotificationBlock):
        raise TypeError(f"block {block} ({type(channel).__name__}) cannot send notifications")
    await channel.notify(body, subject)
