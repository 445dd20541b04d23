"""Connections to an emulated host are shared where their socket's path is short enough."""

from pathlib import Path

import pytest

from workbench.hosts.emulated.login import entry, make_private
from workbench.store.errors import HostsError

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


def test_keys_lie_where_nobody_else_can_look(tmp_path):
    make_private(tmp_path / "fresh")
    make_private(tmp_path / "fresh")
    assert (tmp_path / "fresh").stat().st_mode & 0o777 == 0o700
    (tmp_path / "open").mkdir(mode=0o755)
    (tmp_path / "link").symlink_to(tmp_path / "fresh")
    for folder in ("open", "link"):
        with pytest.raises(HostsError, match="give a folder that is not there yet"):
            make_private(tmp_path / folder)
