"""Connections to an emulated host are shared where their socket's path is short enough."""

from pathlib import Path

import pytest

from workbench.hosts.emulated.login import entry

ADDRESS = "10.0.0.1"


@pytest.mark.parametrize(
    ("length", "shared"), [(40, True), (81, True), (82, False), (200, False)]
)  # of the folder; the socket adds a slash and the address, and ssh 17 bytes while it is made
def test_a_connection_is_shared_where_its_socket_can_have_a_name(length: int, shared: bool) -> None:
    folder = Path("/" + "f" * (length - 1))
    told = entry("host-1", ADDRESS, folder)
    assert ("ControlPath" in told) is shared
    assert f"HostName {ADDRESS}\n" in told
    assert f"IdentityFile {folder}/key\n" in told
