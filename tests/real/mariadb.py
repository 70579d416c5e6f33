"""A real database server on loopback, for tests: everything it has lies in one directory."""

import os
import pwd
import shutil
import socket
import subprocess
from contextlib import suppress
from pathlib import Path

PROGRAMS = ("mariadbd", "mariadb-install-db")
INSTALL_S = 600.0
"""How long an empty database may take to be made, seconds."""


def found(program: str) -> str | None:
    """Where a program is; daemons are not on everybody's search path."""
    return shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def prepare(directory: Path, port: int, user: str, password: str, database: str) -> list[str]:
    """Make an empty server in `directory`; the arguments that `mariadbd` serves it with.

    `user` may do everything in `database`, which is there.
    """
    data, temporary = directory / "mysql", directory / "tmp"
    for made in (data, temporary):
        made.mkdir(mode=0o700)
    me = pwd.getpwuid(os.geteuid()).pw_name
    # A server that starts removes the temporary tables of all others that have the same directory.
    common = ["--no-defaults", f"--datadir={data}", f"--tmpdir={temporary}", f"--user={me}"]
    ended = subprocess.run(
        ["mariadb-install-db", *common, "--auth-root-authentication-method=normal",
         "--skip-test-db"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=INSTALL_S, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout
    setup = directory / "setup.sql"
    setup.write_text(
        f"CREATE USER IF NOT EXISTS '{user}'@'%' IDENTIFIED BY '{password}';\n"
        f"CREATE DATABASE IF NOT EXISTS {database};\n"
        f"GRANT ALL ON {database}.* TO '{user}'@'%';\n"
    )
    return [
        *common, f"--socket={directory / 'sql'}", "--bind-address=127.0.0.1",
        f"--port={port}", f"--pid-file={directory / 'sql.pid'}", f"--init-file={setup}",
        "--skip-name-resolve", "--innodb-buffer-pool-size=64M", "--innodb-log-file-size=16M",
        "--innodb-lock-wait-timeout=900", "--innodb-flush-log-at-trx-commit=0",
    ]  # fmt: skip


def answers(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False
