"""What lasts and needs little of the processor goes on beside other tests."""

import pytest


def begin(request: pytest.FixtureRequest, name: str) -> None:
    """Set up a fixture of the session now, if a test of this pytest run needs it."""
    if any(name in item.fixturenames for item in request.session.items):
        request.getfixturevalue(name)
