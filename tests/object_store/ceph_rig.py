"""A Ceph object gateway on loopback, from Debian's packages: a real store that can be killed and started again.

One monitor, one storage daemon that keeps all in memory, one gateway; no manager, no systemd, everything in one
temporary directory. The gateway may be killed at any time; the storage daemon forgets what it held.
"""

import os
import shutil
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import moto_rig

PROGRAMS = ("ceph-mon", "ceph-osd", "radosgw", "radosgw-admin", "ceph", "ceph-authtool", "monmaptool")
SETTINGS = """
[global]
fsid = {fsid}
mon_host = v2:127.0.0.1:{mon_port}
public_addr = 127.0.0.1
cluster_addr = 127.0.0.1
ms_bind_msgr1 = false
osd_pool_default_size = 1
osd_pool_default_min_size = 1
osd_pool_default_pg_num = 1
osd_pool_default_pgp_num = 1
osd_crush_chooseleaf_type = 0
mon_allow_pool_size_one = true
mon_max_pg_per_osd = 1000
osd_objectstore = memstore
memstore_device_bytes = 2147483648
run_dir = {root}
admin_socket = {root}/$name.asok
log_file = {root}/$name.log
pid_file = {root}/$name.pid
keyring = {root}/keyring
mon_data = {root}/mon
osd_data = {root}/osd
rgw_data = {root}/rgw
[client.rgw.x]
rgw_frontends = beast endpoint=127.0.0.1:{port}
"""


def missing() -> str | None:
    """What keeps a gateway from starting here, or `None`."""
    lacking = [name for name in PROGRAMS if shutil.which(name) is None]
    if lacking:
        return f"no {lacking[0]}: apt-get install radosgw ceph-mon ceph-osd ceph-common"
    return None if os.geteuid() == 0 else "the daemons of Ceph start as root"


class Gateway:
    """A running gateway; its monitor and storage daemon stay when it is killed."""

    def __init__(self, root: Path) -> None:
        self.root, self.port = root, moto_rig.free_port()
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self._settings = root / "ceph.conf"
        fsid, mon_port = str(uuid.uuid4()), moto_rig.free_port()
        self._settings.write_text(SETTINGS.format(root=root, fsid=fsid, mon_port=mon_port, port=self.port))
        for folder in ("mon", "osd", "rgw"):
            (root / folder).mkdir()
        self._keys()
        monmap = root / "monmap"
        self._do("monmaptool", "--create", "--fsid", fsid, "--addv", "a", f"[v2:127.0.0.1:{mon_port}]", str(monmap))
        keyring = str(root / "keyring")
        self._do("ceph-mon", "-i", "a", "--mkfs", "--monmap", str(monmap), "--keyring", keyring)
        self._daemons = [self._daemon("ceph-mon", "-i", "a")]
        osd = str(uuid.uuid4())
        self._do("ceph", "osd", "new", osd, "0", timeout=60)
        self._do("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", osd)
        self._daemons.append(self._daemon("ceph-osd", "-i", "0"))
        self._gateway: subprocess.Popen[bytes] | None = None
        self.start()
        user = ("--uid=test", "--display-name=test")
        keys = moto_rig.KEYS
        access = (f"--access-key={keys['AWS_ACCESS_KEY_ID']}", f"--secret-key={keys['AWS_SECRET_ACCESS_KEY']}")
        self._do("radosgw-admin", "-n", "client.rgw.x", "user", "create", *user, *access, timeout=120)

    def start(self) -> None:
        """Start the gateway, and wait until it answers."""
        self._gateway = self._daemon("radosgw", "-n", "client.rgw.x")
        end = time.monotonic() + 90
        while time.monotonic() < end:
            assert self._gateway.poll() is None, "the gateway ended"
            with suppress(OSError):
                socket.create_connection(("127.0.0.1", self.port), 0.5).close()
                return
            time.sleep(0.1)
        raise AssertionError("the gateway does not listen")

    def kill(self) -> None:
        """SIGKILL the gateway."""
        assert self._gateway is not None
        self._gateway.send_signal(signal.SIGKILL)
        self._gateway.wait()

    def close(self) -> None:
        """End all of it."""
        for process in (self._gateway, *reversed(self._daemons)):
            if process is not None and process.poll() is None:
                process.kill()
                process.wait()

    def _keys(self) -> None:
        """One call for each entity: of several in one call, only one stays."""
        everything = ("--cap", "mon", "allow *", "--cap", "osd", "allow *", "--cap", "mgr", "allow *")
        keyring = self.root / "keyring"
        for place, (name, caps) in enumerate(
            {
                "mon.": ("--cap", "mon", "allow *"),
                "client.admin": everything,
                "client.rgw.x": everything,
                "osd.0": ("--cap", "mon", "allow profile osd", "--cap", "osd", "allow *"),
            }.items()
        ):
            create = ("--create-keyring",) if place == 0 else ()
            self._do("ceph-authtool", str(keyring), *create, "--gen-key", "-n", name, *caps)

    def _do(self, program: str, *arguments: str, timeout: int = 30) -> None:
        settings = () if program in ("ceph-authtool", "monmaptool") else ("-c", str(self._settings))
        done = subprocess.run([program, *settings, *arguments], capture_output=True, text=True, timeout=timeout)
        assert done.returncode == 0, f"{program} {' '.join(arguments)}: {done.stderr[-2000:]}"

    def _daemon(self, program: str, *arguments: str) -> "subprocess.Popen[bytes]":
        log = (self.root / f"{program}.out").open("ab")
        with log:
            return subprocess.Popen([program, "-c", str(self._settings), "-f", *arguments], stdout=log, stderr=log)


@contextmanager
def ceph_gateway(root: Path) -> Iterator[Gateway]:
    """A gateway, while the block runs."""
    gateway = Gateway(root)
    try:
        yield gateway
    finally:
        gateway.close()
